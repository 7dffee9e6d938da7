//! Flags of `rangecache static-pod`: those of serving, which the manifest contains, and its own.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use rangecache_base::flags::{Switch as _, parse_duration};
use rangecache_config::Config;

/// Flags of `rangecache static-pod`.
#[derive(Args, Debug, Clone)]
pub struct StaticPodConfig {
    /// The flags of `serve`, as the manifest has them.
    #[command(flatten)]
    pub config: Config,

    /// Action to perform
    #[arg(value_name = "ACTION", value_enum, help_heading = "Static pod")]
    pub action: StaticPodAction,

    /// Folder that the kubelet watches for manifests
    ///
    /// When to change it: the kubelet has another `staticPodPath`
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/etc/kubernetes/manifests",
        help_heading = "Static pod"
    )]
    pub manifests_dir: PathBuf,

    /// File name of the manifests in that folder; the eight digits at the end of the pod's name are put before its extension
    ///
    /// When to change it: a node runs more than one
    #[arg(
        long,
        value_name = "NAME",
        value_parser = parse_name,
        default_value = "rangecache.yaml",
        help_heading = "Static pod"
    )]
    pub manifest_name: String,

    /// Text of the manifest, which install needs
    ///
    /// When to change it: always; `STATIC_POD_MANIFEST` in the environment is its other form
    #[arg(
        long,
        value_name = "TEXT",
        env = "STATIC_POD_MANIFEST",
        hide_env_values = true,
        required_if_eq("action", "install"),
        help_heading = "Static pod"
    )]
    pub manifest: Option<String>,

    /// Time for the new pod to become ready; afterwards its manifest is removed, and the one before it stays
    ///
    /// When to change it: the keyspace takes longer to load, or a failed update should be taken back earlier
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = parse_duration,
        default_value = "10m",
        help_heading = "Static pod"
    )]
    pub ready_timeout: Duration,

    /// Name of this attempt: a manifest that did not become ready is not installed again under the same name
    /// [default: none]
    ///
    /// When to change it: a failed manifest is to be tried again: it is refused under the same name;
    /// `STATIC_POD_ATTEMPT` in the environment
    #[arg(
        long,
        value_name = "NAME",
        env = "STATIC_POD_ATTEMPT",
        help_heading = "Static pod"
    )]
    pub attempt: Option<String>,

    /// Remove the pod, or move its port, although the manifest of an apiserver on this node names its listener
    ///
    /// When to change it: the apiserver of that manifest is gone, or may lose its etcd
    #[arg(long, switch(), help_heading = "Static pod")]
    pub force: bool,
}

/// Action of `rangecache static-pod`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StaticPodAction {
    /// Write the manifest after a check, and take it back if the pod does not become ready
    Install,
    /// Remove the manifest
    Remove,
    /// Wait for SIGTERM and do nothing: for a DaemonSet, whose pods must not end
    Hold,
}

/// A file name that the kubelet reads: it ignores names that begin with a dot.
fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.starts_with('.') || text.contains(['/', '\0']) {
        return Err("write a file name without a folder, which does not begin with a dot".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_kubelet_ignores_are_refused() {
        assert_eq!(parse_name("rangecache.yaml").as_deref(), Ok("rangecache.yaml"));
        for name in ["", ".rangecache.yaml", "a/b", ".."] {
            assert!(parse_name(name).is_err(), "{name}");
        }
    }
}
