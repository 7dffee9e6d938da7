//! Reloads: changes of flags while the process runs, on SIGHUP and `POST /reload`.
//!
//! The command line and the environment of a process cannot change, the file of `--flags-file` can. A reload reads all of
//! them again and validates them before it changes anything.

use std::{sync::Arc, time::Duration};

use rangecache_base::telemetry::{Telemetry, log::LogLevel, state_changes::ChangeKind};
use rangecache_config::{LiveConfig, RELOADABLE, ReloadRequests, Reloaded, Setting, bounds};
use rangecache_mirror::Mirrors;
use rangecache_proxy::Proxy;
use rangecache_upstream::Upstream;

use crate::cli::Serving;

/// Time limit for reading the file: the directory may be on a file system that does not respond.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Performs reloads, one after another.
#[derive(Debug)]
pub struct Reloader {
    /// The flags of the process.
    pub live: LiveConfig,
    /// Takes over new endpoints.
    pub upstream: Arc<Upstream>,
    /// Takes over new prefixes.
    pub mirrors: Arc<Mirrors>,
    /// Takes over new bounds.
    pub proxy: Arc<Proxy>,
    /// Takes over new shares of the access log and of traces.
    pub telemetry: Arc<Telemetry>,
    /// Level of the log.
    pub log_level: LogLevel,
}

impl Reloader {
    /// Performs `requests` until all handles are dropped.
    pub async fn run(mut self, mut requests: ReloadRequests) {
        while let Some(reply) = requests.next().await {
            let reloaded = self.reload().await;
            if let Some(reply) = reply {
                // An error means that the caller has given up.
                let _ = reply.send(reloaded);
            }
        }
    }

    async fn reload(&mut self) -> Result<Reloaded, String> {
        let metrics = &self.telemetry.metrics.process;
        let reading = tokio::task::spawn_blocking(Serving::again);
        let read = match tokio::time::timeout(READ_TIMEOUT, reading).await {
            Ok(Ok(read)) => read,
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the file of --flags-file could not be read in time".to_owned()),
        };
        let read = match read {
            Ok(serving) => discovered(serving).await,
            Err(error) => Err(error),
        };
        let serving = match read.and_then(|serving| self.check(serving)) {
            Ok(serving) => serving,
            Err(error) => {
                metrics.record_reload("refused");
                self.record(ChangeKind::FlagsRefused, "", &error);
                tracing::error!(
                    error,
                    "the flags cannot be reloaded; the process runs on with those that it has"
                );
                return Err(error);
            }
        };
        let reloaded = self.apply(serving).await;
        let result = if reloaded.changed.is_empty() {
            "unchanged"
        } else {
            "changed"
        };
        self.telemetry.metrics.process.record_reload(result);
        for change in &reloaded.changed {
            tracing::info!(change, "a flag was reloaded");
        }
        if !reloaded.needs_restart.is_empty() {
            let changes = reloaded.needs_restart.join("; ");
            tracing::warn!(changes, "flags differ that take effect with the next start only");
        }
        Ok(reloaded)
    }

    /// Records a change for the page.
    fn record(&self, kind: ChangeKind, flag: &str, details: &str) {
        self.telemetry.state_changes.record(kind, flag, details);
    }

    /// Checks what only the running process can.
    fn check(&self, serving: Serving) -> Result<Serving, String> {
        let mirror = &serving.config.mirror;
        if !self
            .mirrors
            .has_places(&mirror.cache_prefix, &mirror.no_cache_prefix)
        {
            return Err(
                "too many mirrors were added since the start: restart rangecache to change --cache-prefix"
                    .to_owned(),
            );
        }
        let (etcd, has_tls) = (&serving.config.etcd, self.upstream.connector().has_tls());
        if let Some(url) = etcd.all_endpoints().iter().find(|url| url.tls && !has_tls) {
            return Err(format!(
                "{url} is an endpoint with TLS, and rangecache was started without TLS towards etcd: restart it"
            ));
        }
        etcd.keeps_tls(has_tls).map_err(|error| error.to_string())?;
        Ok(serving)
    }

    /// Takes over what may change in a running process.
    async fn apply(&mut self, serving: Serving) -> Reloaded {
        let mut reloaded = Reloaded::default();
        let mut settings = Vec::clone(&self.live.settings());
        for (running, new) in settings.iter_mut().zip(serving.settings) {
            if running.has_value_of(&new) {
                continue;
            }
            let change = format!("{}: {} → {}", new.flag, shown(running), shown(&new));
            if RELOADABLE.iter().any(|reloadable| reloadable.flag == new.flag) {
                let values = format!("{} → {}", shown(running), shown(&new));
                self.record(ChangeKind::FlagChanged, &new.flag, &values);
                reloaded.changed.push(change);
                *running = new;
            } else {
                reloaded.needs_restart.push(change);
            }
        }
        // Also those that DNS names, which are no change of a flag.
        let etcd = &serving.config.etcd;
        if etcd.all_endpoints() != self.live.load().etcd.all_endpoints() {
            self.upstream.set_endpoints(&etcd.endpoints);
            self.upstream.set_fallback(&etcd.fallback_endpoints);
        } else if reloaded.changed.is_empty() {
            return reloaded;
        }
        self.live.reload(&serving.config, settings);
        let config = self.live.load_full();
        let (prefixes, excluded) = (&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
        self.mirrors.set_scopes(prefixes, excluded).await;
        self.log_level.set(&config.log.level);
        self.telemetry.access_log.set_share(config.access_log.sample);
        self.telemetry.tracer.set_share(config.trace.trace_sample);
        self.proxy.reload(&config.limits);
        for bound in bounds::ALL {
            if RELOADABLE.iter().any(|reloadable| reloadable.flag == bound.flag) {
                let value = bound.value(&config);
                self.telemetry.metrics.process.set_limit(bound.name, value);
            }
        }
        reloaded
    }
}

/// The flags with the endpoints that DNS names.
async fn discovered(mut serving: Serving) -> Result<Serving, String> {
    let discovering = serving.config.etcd.discover();
    if discovering.await.map_err(|error| error.to_string())? {
        serving.config.validate().map_err(|error| error.to_string())?;
    }
    Ok(serving)
}

fn shown(setting: &Setting) -> &str {
    match setting.shown() {
        "" => "none",
        value => value,
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, FromArgMatches as _};
    use rangecache_base::telemetry::log;
    use rangecache_config::{Config, settings};
    use rangecache_proxy::testing::Scene;

    use super::*;

    /// A reloader of a process that started with `flags`, as `scene` did.
    fn reloader(scene: &Scene, flags: &[&str]) -> Reloader {
        let Serving { config, settings } = serving(flags);
        Reloader {
            live: LiveConfig::new(config, settings),
            upstream: Arc::clone(&scene.upstream),
            mirrors: Arc::clone(&scene.mirrors),
            proxy: Arc::clone(&scene.proxy),
            telemetry: Arc::clone(&scene.telemetry),
            log_level: log::init("error", false),
        }
    }

    fn serving(flags: &[&str]) -> Serving {
        let args = [&["rangecache"], flags, &["--endpoints=http://127.0.0.1:1"]].concat();
        let matches = Config::command().try_get_matches_from(args).unwrap();
        let config = Config::from_arg_matches(&matches).unwrap();
        let settings = settings(&config, &matches, &std::collections::BTreeSet::new());
        Serving { config, settings }
    }

    #[tokio::test]
    async fn reload_takes_over_what_it_may_and_names_what_needs_a_restart() {
        let scene = Scene::new(&["--max-calls=100"]);
        let mut reloader = reloader(&scene, &["--max-calls=100"]);
        let flags = ["--max-calls=7", "--when-behind=fail", "--connect-timeout=9s"];
        let reloaded = reloader.apply(serving(&flags)).await;
        assert_eq!(
            reloaded.changed,
            ["when-behind: forward → fail", "max-calls: 100 → 7"]
        );
        assert_eq!(reloaded.needs_restart.len(), 1, "{:?}", reloaded.needs_restart);
        assert!(reloaded.needs_restart[0].starts_with("connect-timeout: "));
        assert_eq!(reloader.live.load().limits.max_calls, 7);
        let changes = scene.telemetry.state_changes.list();
        let changes: Vec<_> = changes
            .iter()
            .map(|change| (change.kind, change.subject.as_str(), change.details.as_str()))
            .collect();
        assert_eq!(
            changes,
            [
                (ChangeKind::FlagChanged, "when-behind", "forward → fail"),
                (ChangeKind::FlagChanged, "max-calls", "100 → 7"),
            ]
        );
        let again = reloader.apply(serving(&flags)).await;
        assert!(again.changed.is_empty(), "{:?}", again.changed);
        assert_eq!(again.needs_restart, reloaded.needs_restart, "it still differs");
    }

    #[tokio::test]
    async fn mirrors_beyond_the_places_of_the_process_are_refused() {
        let scene = Scene::new(&[]);
        let reloader = reloader(&scene, &[]);
        assert!(reloader.check(serving(&["--cache-prefix=/b/"])).is_ok());
        let many: Vec<_> = (0..1100).map(|n| format!("--cache-prefix=/{n}/")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let refused = reloader.check(serving(&many)).err().unwrap();
        assert!(refused.contains("restart rangecache"), "{refused}");
    }

    #[tokio::test]
    async fn endpoints_change_and_the_first_with_tls_needs_a_restart() {
        let scene = Scene::new(&[]);
        let mut reloader = reloader(&scene, &[]);
        let refused = reloader
            .check(serving(&["--endpoints=https://etcd:1"]))
            .err()
            .unwrap();
        assert!(
            refused.contains("https://etcd:1") && refused.contains("restart it"),
            "{refused}"
        );
        let reloaded = reloader.apply(serving(&["--endpoints=http://127.0.0.1:2"])).await;
        let expected = "endpoints: http://127.0.0.1:1 → http://127.0.0.1:2,http://127.0.0.1:1";
        assert_eq!(reloaded.changed, [expected]);
        let urls: Vec<_> = scene
            .upstream
            .endpoints()
            .iter()
            .map(|view| view.url.to_string())
            .collect();
        assert_eq!(urls, ["http://127.0.0.1:2", "http://127.0.0.1:1"]);
        // Those that DNS names are no change of a flag.
        let mut found = serving(&["--endpoints=http://127.0.0.1:2"]);
        found.config.etcd.endpoints = vec!["http://127.0.0.1:3".parse().unwrap()];
        let reloaded = reloader.apply(found).await;
        assert!(reloaded.changed.is_empty(), "{:?}", reloaded.changed);
        assert_eq!(
            scene.upstream.endpoints()[0].url.to_string(),
            "http://127.0.0.1:3"
        );
    }
}
