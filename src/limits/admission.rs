//! The bound on calls in flight (`--max-calls`).

use prometheus_client::metrics::gauge::Gauge;
use tokio_util::task::TaskTracker;

/// Decides whether one more call is taken.
#[derive(Debug)]
pub struct Admission {
    max_calls: usize,
    /// The tasks of connections and calls.
    tasks: TaskTracker,
    /// Connections that are open.
    connections: Gauge,
}

impl Admission {
    /// At most `max_calls` in flight. `tasks` has one task per open connection, which `connections` counts, and one per call.
    #[must_use]
    pub fn new(max_calls: usize, tasks: &TaskTracker, connections: &Gauge) -> Admission {
        Admission {
            max_calls,
            tasks: tasks.clone(),
            connections: connections.clone(),
        }
    }

    /// Whether more than the bound are in flight, the asking call included. A call counts until the last byte of its response
    /// is sent: hyper drives each in a task of its own, so that this check is two loads.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let connections = usize::try_from(self.connections.get()).unwrap_or(0);
        self.tasks.len().saturating_sub(connections) > self.max_calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_tasks_beyond_those_of_connections() {
        let (tasks, connections) = (TaskTracker::new(), Gauge::default());
        let admission = Admission::new(2, &tasks, &connections);
        let mut tokens: Vec<_> = (0..3).map(|_| tasks.token()).collect();
        assert!(admission.is_full(), "three calls");
        connections.inc();
        assert!(!admission.is_full(), "one of the tasks is a connection's");
        tokens.push(tasks.token());
        assert!(admission.is_full());
        tokens.truncate(3);
        assert!(!admission.is_full(), "a call has ended");
    }
}
