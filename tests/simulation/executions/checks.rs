//! Comparisons of connections with what the mirrors hold.

use std::sync::Arc;
use std::time::Duration;

use rangecache_mirror::WatchedLoads;
use rangecache_upstream::ReceiveWindow;
use tokio::time::{Instant, sleep, timeout};

use super::{put, read_from_memory, run, start, world};
use crate::cluster::MEMBERS;
use crate::members::From;

/// Bound on the time until a connection to a healthy member is there, or compared.
const SOON: Duration = Duration::from_secs(1);

#[test]
fn member_that_does_not_respond_delays_no_comparison_with_another() {
    run(async {
        let world = world([put("/sim/a/0", "zero")]).await;
        let rangecache = start(&[]).await;
        read_from_memory(&world, "/sim/a/0").await;
        let (mirrors, upstream) = rangecache.parts();
        let connect = async |avoided| {
            let deadline = Instant::now() + SOON;
            let connection = upstream.dedicated(ReceiveWindow::DEDICATED, avoided, deadline);
            connection.await.expect("connects")
        };
        let silent = connect(None).await;
        let healthy = connect(Some(silent.url())).await;
        let member = (0..MEMBERS)
            .find(|member| {
                silent
                    .url()
                    .to_string()
                    .contains(&From::Rangecache.authority(*member))
            })
            .expect("one of the members");
        world.cluster.change(|state| {
            state.members[member].is_paused = true;
            // Without it no member could read.
            state.leader = Some((member + 1) % MEMBERS);
        });
        let history = mirrors.cluster_state.history();
        let waiting = {
            let (mirrors, silent) = (Arc::clone(&mirrors), Arc::clone(&silent));
            tokio::spawn(async move {
                mirrors
                    .may_continue(&silent, history, &WatchedLoads::default())
                    .await
            })
        };
        sleep(Duration::from_millis(100)).await;
        let compared = timeout(
            SOON,
            mirrors.may_continue(&healthy, history, &WatchedLoads::default()),
        )
        .await;
        assert!(!waiting.is_finished(), "the member responds");
        assert_eq!(compared.ok(), Some(true));
        waiting.abort();
        drop((mirrors, upstream, silent, healthy));
        assert!(rangecache.stop().await, "every task ends");
    });
}
