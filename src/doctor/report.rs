//! What was found.

use super::keyspace::Keyspace;
use super::members::Described;
use super::prospects::Need;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Good,
    /// It works, and somebody should know.
    Warning,
    /// rangecache would not start, would not reach etcd, or would answer less from memory than it was asked to.
    Bad,
}

/// What a finding is about, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Area {
    /// `--endpoints`.
    Endpoints,
    /// What depends on etcd's version.
    Gates,
    /// etcd's users and rights.
    Auth,
    /// TLS, both sides.
    Certificates,
    /// What etcd holds.
    Keyspace,
    /// Whether it fits.
    Memory,
    /// What comes of it.
    Verdict,
}

impl Area {
    /// All of them, in order.
    pub const ALL: [Area; 7] = [
        Area::Endpoints,
        Area::Gates,
        Area::Auth,
        Area::Certificates,
        Area::Keyspace,
        Area::Memory,
        Area::Verdict,
    ];

    /// Its name in both forms of the report.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Area::Endpoints => "endpoints",
            Area::Gates => "gates",
            Area::Auth => "auth",
            Area::Certificates => "certificates",
            Area::Keyspace => "keyspace",
            Area::Memory => "memory",
            Area::Verdict => "verdict",
        }
    }
}

impl Level {
    /// Its name in the report for scripts.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Good => "ok",
            Level::Warning => "warning",
            Level::Bad => "bad",
        }
    }
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is about.
    pub area: Area,
    /// How bad it is.
    pub level: Level,
    /// What is.
    pub text: String,
    /// What to do.
    pub remedy: Option<String>,
}

/// All that was found.
#[derive(Debug, Default)]
pub struct Report {
    /// In the order in which they were found.
    pub findings: Vec<Finding>,
    pub(super) endpoints: Vec<Described>,
    pub(super) keyspace: Option<Keyspace>,
    pub(super) needs: Vec<Need>,
}

impl Report {
    pub(super) fn good(&mut self, area: Area, text: impl Into<String>) {
        self.add(area, Level::Good, text.into(), None);
    }

    pub(super) fn warn(&mut self, area: Area, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(area, Level::Warning, text.into(), Some(remedy.into()));
    }

    pub(super) fn bad(&mut self, area: Area, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(area, Level::Bad, text.into(), Some(remedy.into()));
    }

    fn add(&mut self, area: Area, level: Level, text: String, remedy: Option<String>) {
        self.findings.push(Finding {
            area,
            level,
            text,
            remedy: remedy.filter(|text| !text.is_empty()),
        });
    }

    /// The worst of all findings.
    #[must_use]
    pub fn level(&self) -> Level {
        let levels = self.findings.iter().map(|finding| finding.level);
        levels.max().unwrap_or(Level::Good)
    }

    /// 0, or 1 if anything is bad.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        u8::from(self.level() == Level::Bad)
    }
}
