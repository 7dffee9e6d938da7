//! [`FindingId`]: every finding that the page and `doctor` can report, with its severities, meaning, remedy and alerts.
//!
//! docs/reference/findings.md is generated from this table.

use serde::{Deserialize, Serialize, Serializer};

/// Declares an enum whose variants have names, in the order of their values.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $enum { $($(#[$doc])* $variant,)+ }

        impl $enum {
            /// Every variant, ascending.
            pub const ALL: [$enum; [$($name),+].len()] = [$($enum::$variant),+];

            /// Name of the variant.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $($enum::$variant => $name,)+ }
            }
        }
    };
}
pub(super) use named;

named! {
    /// Severity of a finding, ascending.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Severity {
        /// Expected state.
        #[default]
        Good = "good",
        /// Temporary, or intended.
        Note = "note",
        /// Responses are correct, but slower than they need to be.
        Warning = "warning",
        /// Calls fail, or an operator must act.
        Bad = "bad",
    }
}

named! {
    /// Subject of findings, in the order of `doctor`'s report.
    pub enum Area {
        /// `--endpoints`.
        Endpoints = "endpoints",
        /// Capabilities that depend on etcd's version.
        Gates = "gates",
        /// etcd's users and permissions.
        Auth = "auth",
        /// TLS towards clients and towards etcd.
        Certificates = "certificates",
        /// Keys in etcd.
        Keyspace = "keyspace",
        /// Memory that the mirrors need.
        Memory = "memory",
        /// Watches of etcd's clients.
        Watches = "watches",
        /// Mirrors of a process that runs.
        Mirrors = "mirrors",
        /// Calls of clients.
        Calls = "calls",
        /// Process as a whole.
        Process = "process",
        /// Conclusion.
        Verdict = "verdict",
    }
}

named! {
    /// Command or page that reports a finding.
    pub enum ReportedBy {
        /// The page, `/status` and `rangecache status`.
        Status = "status",
        /// `rangecache doctor`.
        Doctor = "doctor",
    }
}

/// Declares [`FindingId`]. Each entry has its meaning as a doc comment, its id, its area, the reports that have it, the alerts that tell the same
/// (without the `Rangecache` that each begins with), its severities (the usual one first), and its remedy, which is empty if no action
/// is needed.
macro_rules! finding_ids {
    ($(
        $(#[doc = $meaning:literal])+
        $name:ident = $id:literal of $area:ident in [$($by:ident),+] $(alerts [$($alert:ident),+])?: [$($severity:ident),+], $remedy:literal;
    )+) => {
        /// Identity of a finding, for scripts. An id keeps its meaning; texts may change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum FindingId {
            $($(#[doc = $meaning])+ $name,)+
        }

        impl FindingId {
            /// Every id.
            pub const ALL: &'static [FindingId] = &[$(FindingId::$name),+];

            /// The id in JSON, in kebab case.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(FindingId::$name => $id,)+ }
            }

            /// Name of the variant.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(FindingId::$name => stringify!($name),)+ }
            }

            /// Meaning and cause.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self { $(FindingId::$name => concat!($($meaning),+),)+ }.trim()
            }

            /// Remedy; empty if no action is needed. A finding may have a more precise one.
            #[must_use]
            pub fn remedy(self) -> &'static str {
                match self { $(FindingId::$name => $remedy,)+ }
            }

            /// Severities that the finding can have, the usual one first.
            #[must_use]
            pub fn severities(self) -> &'static [Severity] {
                match self { $(FindingId::$name => &[$(Severity::$severity),+],)+ }
            }

            /// Subject of the finding.
            #[must_use]
            pub fn area(self) -> Area {
                match self { $(FindingId::$name => Area::$area,)+ }
            }

            /// Reports that can have the finding.
            #[must_use]
            pub fn reported_by(self) -> &'static [ReportedBy] {
                match self { $(FindingId::$name => &[$(ReportedBy::$by),+],)+ }
            }

            /// Alerts of `charts/rangecache/files/alerts.yaml` that tell the same.
            #[must_use]
            pub fn alerts(self) -> &'static [&'static str] {
                match self { $(FindingId::$name => &[$($(concat!("Rangecache", stringify!($alert))),+)?],)+ }
            }

            /// Severity that the finding has unless its constructor sets another one.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(FindingId::$name => finding_ids!(@first $($severity),+),)+ }
            }
        }
    };
    (@first $first:ident $(, $others:ident)*) => { Severity::$first };
}

impl Serialize for FindingId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_str().serialize(serializer)
    }
}

finding_ids! {
    /// No rangecache responds: it is down, or listens elsewhere. If it is down, its clients cannot reach etcd through it.
    NoResponse = "no-response" of Process in [Status] alerts [Absent, Down]: [Bad],
        "--metrics-url names its listener for operators (--listen-metrics-urls); if it does not run, the end of its log says why.";
    /// No endpoint is connected: calls wait up to `--connect-timeout` for a connection and then fail with `Unavailable`.
    EtcdUnreachable = "etcd-unreachable" of Endpoints in [Status, Doctor] alerts [EndpointUnhealthy, QuorumChecksFail, ReadsFail]: [Bad],
        "Check that etcd runs, that --endpoints names it, and that certificates and the network let rangecache connect.";
    /// No connected member serves, votes and knows a leader: linearizable reads and writes wait, and fail.
    NoHealthyMember = "no-healthy-member" of Endpoints in [Status] alerts [EndpointUnhealthy, QuorumChecksFail]: [Bad],
        "Check etcd first: etcdctl endpoint status --cluster.";
    /// No member answers a linearizable read: there is no leader or no quorum, or the endpoints are not etcd.
    NoQuorum = "no-quorum" of Endpoints in [Doctor]: [Bad],
        "there is no leader or no quorum, or the endpoints are not etcd: check etcd first (etcdctl endpoint status --cluster)";
    /// A linearizable read takes longer than 20 ms, which each linearizable read from memory waits for its proof.
    QuorumSlow = "quorum-slow" of Endpoints in [Doctor]: [Warning],
        "each linearizable read from memory waits that long for its proof: check etcd's disks and network";
    /// The quorum answers a linearizable read, in the time that the finding names.
    QuorumAnswers = "quorum-answers" of Endpoints in [Doctor]: [Good], "";
    /// More than a tenth of the quorum checks of the last five minutes failed, so that etcd's revision is not confirmed: linearizable reads
    /// are forwarded, and fail as they would without rangecache.
    QuorumChecksFail = "quorum-checks-fail" of Endpoints in [Status] alerts [QuorumChecksFail]: [Bad],
        "Check etcd first: etcdctl endpoint status --cluster.";
    /// In the last five minutes one read in a hundred waited longer than 200 ms for its proof: etcd responds slowly to quorum checks, or the
    /// mirror lags behind.
    ProofsSlow = "proofs-slow" of Endpoints in [Status] alerts [ProofsSlow]: [Warning],
        "Relieve etcd if its checks are slow (rangecache_quorum_check_duration_seconds); otherwise give rangecache more CPU.";
    /// Calls of this rangecache come back to it: `--endpoints` leads to itself, or to one whose `--endpoints` leads here. Every call fails.
    Loops = "loops" of Endpoints in [Status] alerts [Loops]: [Bad],
        "Point --endpoints at etcd's members.";
    /// An endpoint is not connected, and others are.
    MemberNotConnected = "member-not-connected" of Endpoints in [Status, Doctor] alerts [EndpointUnhealthy]: [Warning],
        "Check that the member runs and can be reached.";
    /// A member does not serve, has no leader or does not vote; other endpoints are preferred.
    MemberUnhealthy = "member-unhealthy" of Endpoints in [Status, Doctor] alerts [EndpointUnhealthy]: [Warning],
        "Check the member: etcdctl endpoint status --cluster.";
    /// A member serves; the finding names its version, its role and the size of its database.
    MemberHealthy = "member-healthy" of Endpoints in [Doctor]: [Good], "";
    /// A member is a learner, which does not vote.
    MemberIsLearner = "member-is-learner" of Endpoints in [Doctor]: [Warning],
        "a learner does not vote: it is used only while there is no other endpoint";
    /// A member knows no leader.
    MemberWithoutLeader = "member-without-leader" of Endpoints in [Doctor]: [Bad],
        "etcd cannot answer linearizable reads: restore the quorum";
    /// A member is connected and reports its status to users only.
    StatusForUsersOnly = "status-for-users-only" of Endpoints in [Doctor]: [Good], "";
    /// A member is connected and does not report its status.
    StatusCallFailed = "status-call-failed" of Endpoints in [Doctor]: [Bad],
        "check that this is etcd's client URL: without a version nothing is answered from memory";
    /// A member has raised the alarm NOSPACE: etcd refuses writes.
    AlarmNoSpace = "alarm-no-space" of Endpoints in [Doctor]: [Warning],
        "etcd refuses writes: compact, defragment, raise --quota-backend-bytes, then etcdctl alarm disarm";
    /// A member has raised the alarm CORRUPT: its data is corrupt.
    AlarmCorrupt = "alarm-corrupt" of Endpoints in [Doctor]: [Warning],
        "replace this member: its data is corrupt, and its responses cannot be trusted, with or without rangecache";
    /// A member reports another error than an alarm that is known.
    MemberReportsError = "member-reports-error" of Endpoints in [Doctor]: [Warning],
        "see etcd's log";
    /// The database of a member uses more than 80 % of its quota.
    DatabaseNearQuota = "database-near-quota" of Endpoints in [Doctor]: [Warning],
        "compact and defragment, or raise etcd's --quota-backend-bytes: at its quota etcd refuses writes";
    /// The endpoints lead to different clusters: the one that most of them lead to is used, and the others are left out.
    DifferentClusters = "different-clusters" of Endpoints in [Status, Doctor] alerts [OtherCluster]: [Bad],
        "Name the members of one cluster in --endpoints, and correct what is behind the name.";
    /// `--endpoints` does not name all members: while the named ones are down or cut off, nothing can be proven.
    MembersNotNamed = "members-not-named" of Endpoints in [Doctor]: [Warning],
        "name every member, unless one name resolves to all: while the named ones are down or cut off, nothing can be proven and reads are \
         forwarded";
    /// `--endpoints` names every member of the cluster.
    MembersNamed = "members-named" of Endpoints in [Doctor]: [Good], "";
    /// No member has reported its version yet, or the server is not etcd: every read is forwarded.
    VersionUnknown = "version-unknown" of Gates in [Status] alerts [CannotCache]: [Note],
        "If this lasts, check whether members respond: etcdctl endpoint status.";
    /// The members have different versions; the lowest one decides what is trusted.
    VersionsDiffer = "versions-differ" of Gates in [Doctor]: [Warning],
        "fine during an upgrade: the lowest version decides what is trusted";
    /// A capability that depends on etcd's version is available.
    CapabilityAvailable = "capability-available" of Gates in [Doctor]: [Good], "";
    /// A capability is available on some of the endpoints.
    CapabilityPartial = "capability-partial" of Gates in [Doctor]: [Note], "";
    /// A capability was switched off by its flag.
    CapabilityOff = "capability-off" of Gates in [Doctor]: [Note], "";
    /// The members have not reported whether they have a capability.
    CapabilityUnknown = "capability-unknown" of Gates in [Doctor]: [Note], "";
    /// etcd is too old for a capability. A warning if linearizable reads are forwarded without it, which is bad for `doctor`.
    CapabilityTooOld = "capability-too-old" of Gates in [Status, Doctor] alerts [CannotCache]: [Note, Warning, Bad],
        "Upgrade every member of etcd.";
    /// etcd, or a proxy in front of it, does not implement a capability. Severities as of `capability-too-old`.
    CapabilityUnimplemented = "capability-unimplemented" of Gates in [Status, Doctor] alerts [CannotCache]: [Note, Warning, Bad],
        "Upgrade every member of etcd.";

    /// etcd's auth is on, and rangecache has no user of its own: nothing can be mirrored, and every read is forwarded.
    UserMissing = "user-missing" of Auth in [Status, Doctor] alerts [CannotCache]: [Warning, Bad],
        "Set --user and --password-file to a user that may read what is mirrored; docs/security.md has the commands.";
    /// etcd rejects the user of `--user`, or its password.
    UserRejected = "user-rejected" of Auth in [Status, Doctor] alerts [CannotCache, MirrorOutOfService]: [Warning, Bad],
        "Fix the user, or the password (--password, --password-file).";
    /// rangecache's own user may not read all that is to be mirrored.
    UserLacksPermission = "user-lacks-permission" of Auth in [Status, Doctor] alerts [CannotCache, MirrorOutOfService]: [Warning, Bad],
        "Grant the user a role with read permission for that prefix (for all keys without --cache-prefix).";
    /// etcd did not say whether it accepts the user, or what it may read.
    UserNotChecked = "user-not-checked" of Auth in [Doctor]: [Bad],
        "check etcd first";
    /// The user or its password file cannot be used.
    UserUnusable = "user-unusable" of Auth in [Doctor]: [Bad],
        "fix it first: rangecache does not start with it";
    /// etcd's auth is on, and rangecache's own user may read all that is to be mirrored.
    UserAccepted = "user-accepted" of Auth in [Doctor]: [Good], "";
    /// etcd's auth is off.
    AuthOff = "auth-off" of Auth in [Doctor]: [Good], "";
    /// The certificate in `--cert` has a common name, which etcd may take for a user.
    CertificateHasCommonName = "certificate-has-common-name" of Auth in [Doctor]: [Warning],
        "use a certificate without a CN: an etcd with --client-cert-auth and auth treats every client without a token as that user";

    /// A certificate, a CA or a revocation list has expired: peers refuse to connect.
    CertificateExpired = "certificate-expired" of Certificates in [Status, Doctor] alerts [CertificateExpires]: [Bad],
        "Write the new certificates to the same file: it is read again without a restart.";
    /// A certificate is not valid yet.
    CertificateNotYetValid = "certificate-not-yet-valid" of Certificates in [Doctor]: [Bad],
        "check the clocks of both machines";
    /// A certificate, a CA or a revocation list expires within 14 days; for `doctor`, within 30. Bad within one day.
    CertificateExpiresSoon = "certificate-expires-soon" of Certificates in [Status, Doctor] alerts [CertificateExpires]: [Warning, Bad],
        "Write the new certificates to the same file: it is read again without a restart.";
    /// A certificate is valid, until the day that the finding names.
    CertificateValid = "certificate-valid" of Certificates in [Doctor]: [Good], "";
    /// A file of certificates or keys cannot be used.
    CertificateUnusable = "certificate-unusable" of Certificates in [Doctor]: [Bad],
        "fix it first: rangecache does not start with it";
    /// `--insecure-skip-tls-verify` is set: etcd's certificate is not verified.
    CertificateNotVerified = "certificate-not-verified" of Certificates in [Doctor]: [Warning],
        "use --cacert instead: without verification, a host between rangecache and etcd can read and answer calls";
    /// `--auto-tls` is set: clients cannot verify the generated certificate.
    CertificateGenerated = "certificate-generated" of Certificates in [Doctor]: [Warning],
        "set --cert-file and --key-file";
    /// Connections to etcd are not encrypted.
    NoTls = "no-tls" of Certificates in [Doctor]: [Good], "";

    /// The files of a certificate were replaced by some that cannot be used: the old ones stay in use until they expire.
    CertificateNotReloaded = "certificate-not-reloaded" of Certificates in [Status] alerts [CertificateReloadFails]: [Warning],
        "Correct the file that the log names; it is read again by itself.";
    /// More than half of the TLS handshakes with clients failed in the last ten minutes.
    HandshakesFail = "handshakes-fail" of Certificates in [Status] alerts [HandshakesFail]: [Warning],
        "The log names clients and errors. Replace the certificate, or correct the clients'.";

    /// A mirror is being loaded from etcd; its reads are forwarded.
    MirrorLoading = "mirror-loading" of Mirrors in [Status] alerts [MirrorOutOfService]: [Note],
        "Wait. If loading starts again and again, the log says why loads fail.";
    /// The keys of a mirror do not fit into `--cache-max-bytes`: it is disabled (over budget), and its reads are forwarded.
    MirrorOverBudget = "mirror-over-budget" of Mirrors in [Status] alerts [OverBudget, MirrorOutOfService]: [Warning],
        "Raise --cache-max-bytes, and the memory limit with it; or mirror less with --cache-prefix or --no-cache-prefix.";
    /// A mirror is out of service for another reason, which `/status` names in `mirrors`; its reads are forwarded.
    MirrorOutOfService = "mirror-out-of-service" of Mirrors in [Status] alerts [MirrorOutOfService]: [Warning],
        "Follow the finding's text; the outcomes and reasons in docs/consistency.md explain each reason.";
    /// Memory is too scarce for all values of a mirror: those of some prefixes are only in etcd.
    ValuesNotHeld = "values-not-held" of Mirrors in [Status] alerts [ValuesNotHeld]: [Warning],
        "Raise --cache-max-bytes and the memory limit, or leave out prefixes that are rarely read (--no-cache-prefix).";
    /// The image of a mirror cannot be written (`--image-dir`): the disk is full, cannot be reached, or `--image-max-bytes` is too
    /// small. Serving continues, and the next start reads more from etcd.
    ImageNotWritten = "image-not-written" of Mirrors in [Status] alerts [ImageNotWritten]: [Warning],
        "The log says why; make room in --image-dir, raise --image-max-bytes, or restore the disk.";
    /// A rangecache that `--warm-from` names cannot be reached, or does not have the keys of a mirror in memory; each is asked once a
    /// minute. Serving continues, and the next start may read every key from etcd.
    NeighbourOfNoUse = "neighbour-of-no-use" of Mirrors in [Status]: [Note],
        "Check that the neighbour runs, is of the same etcd and mirrors the same keys, or name another one in --warm-from.";
    /// A mirror is in service and has no key: its prefix may be mistyped. A note if it mirrors the whole keyspace.
    MirrorEmpty = "mirror-empty" of Mirrors in [Status] alerts [MirrorEmpty]: [Warning, Note],
        "Check --cache-prefix and --no-cache-prefix: rangecache doctor lists the prefixes that there are.";
    /// A mirror was loaded again more than three times in the last hour. Each load reads the whole mirror from etcd.
    MirrorReloads = "mirror-reloads" of Mirrors in [Status] alerts [MirrorReloads]: [Warning],
        "The label reason of rangecache_mirror_reloads_total has the cause; see its runbook.";
    /// A mirror has been more than ten seconds behind etcd for two minutes: its linearizable reads are forwarded.
    MirrorLags = "mirror-lags" of Mirrors in [Status] alerts [MirrorLags]: [Warning],
        "Give rangecache or its host more CPU, or find why the watches of the member are slow.";
    /// Verification has found that a mirror differed from etcd.
    MirrorDiffered = "mirror-differed" of Mirrors in [Status] alerts [VerifyMismatch]: [Bad],
        "Compare the members (etcdctl endpoint hashkv --cluster). If they agree with each other, please report a bug in rangecache.";

    /// rangecache is stopping: no new calls are accepted.
    Stopping = "stopping" of Process in [Status]: [Note], "";
    /// rangecache is ready, and memory answers nothing: no mirror in service has keys, or memory is switched off. Every read is forwarded.
    AnswersNothing = "answers-nothing" of Process in [Status] alerts [MirrorEmpty, MirrorOutOfService, OverBudget, MemoryOff]: [Warning],
        "Follow the findings about mirrors and memory.";
    /// An operator has switched memory off (`POST /forward-all`): etcd answers every read and serves every watch.
    MemorySwitchedOff = "memory-switched-off" of Process in [Status] alerts [MemoryOff]: [Warning],
        "rangecache ctl use-memory (DELETE /forward-all) lets memory answer again.";
    /// No member of etcd answers, and `--serve-stale` permits responses from the last view. Writes and linearizable reads fail.
    ServesStale = "serves-stale" of Process in [Status] alerts [ServesStale]: [Warning],
        "Bring etcd back. A client that must not read old data asks for linearizable reads.";
    /// A reload of the flags was refused in the last hour: the process runs with the old ones.
    ReloadRefused = "reload-refused" of Process in [Status] alerts [ReloadRefused]: [Warning],
        "Correct the flag that the log names, and reload again.";
    /// Calls or tasks have panicked since the start, which are bugs.
    Panics = "panics" of Process in [Status] alerts [Panics]: [Bad],
        "Please report it with the source location in the log.";
    /// Reads failed in the last 15 minutes, because etcd could not be reached or did not complete its response in time.
    ReadsFailed = "reads-failed" of Calls in [Status] alerts [ReadsFail]: [Bad],
        "Check etcd's members and the network; the reasons of outcomes, on the page and in /status, name the causes.";
    /// Reads were refused in the last 15 minutes, because memory could not answer and a bound was reached.
    ReadsRefused = "reads-refused" of Calls in [Status] alerts [Sheds]: [Bad],
        "Check which bound was reached, and why memory could not answer: the page and /status have both.";
    /// More than half of the reads of the last 15 minutes were answered by etcd.
    MostForwarded = "most-reads-forwarded" of Calls in [Status] alerts [ForwardsMost]: [Note],
        "See why memory could not answer them, by reason.";
    /// More than one in twenty reads of the last 15 minutes was at a revision older than the history that is kept, and went to etcd.
    HistoryShort = "history-short" of Calls in [Status] alerts [HistoryShort]: [Note],
        "Raise --history-max-bytes or --history-max-age.";
    /// Calls were refused in the last 15 minutes, because their share of the buffers (`--buffer-max-bytes`) was used.
    BuffersRefuse = "buffers-refuse" of Calls in [Status] alerts [BuffersRefuse]: [Warning],
        "Find the client that does not read its responses or does not complete its requests, or raise --buffer-max-bytes.";
    /// Calls have waited for room in the buffers (`--buffer-max-bytes`) for five minutes.
    BuffersWait = "buffers-wait" of Calls in [Status] alerts [BuffersWait]: [Warning],
        "Find the client that does not read its responses or does not complete its requests, or raise --buffer-max-bytes.";
    /// Responses were given up in the last 15 minutes, because their clients read too slowly or not at all.
    ResponsesGivenUp = "responses-given-up" of Calls in [Status] alerts [ResponsesGivenUp]: [Warning],
        "Find the clients; for the reasons memory and watch_memory raise --cache-max-bytes or --watch-max-bytes.";
    /// Connections were closed in the last 15 minutes because of what their client does: too many of one address, a flood of control frames,
    /// or TLS handshakes that are not completed.
    ClientMisbehaves = "client-misbehaves" of Calls in [Status] alerts [ClientMisbehaves]: [Warning],
        "Find the client: the log names addresses.";
    /// A client has tried to write at `--read-only-listen-client-urls` in the last 15 minutes, and was refused.
    WritesRefused = "writes-refused" of Calls in [Status] alerts [WritesRefused]: [Warning],
        "Give the client the URL of --listen-client-urls if it is to write.";
    /// Spans did not reach the collector of traces in the last 15 minutes. Requests are not affected.
    SpansLost = "spans-lost" of Process in [Status] alerts [SpansLost]: [Note],
        "Check the collector, lower the sampling ratio, or raise OTEL_BSP_MAX_QUEUE_SIZE.";
    /// 90 % of a bound or more is used; half of `--forward-max-waiting`.
    BoundNearlyReached = "bound-nearly-reached" of Calls in [Status] alerts [MemoryNearBudget, ForwardQueueLong, ConnectionsNearLimit, BoundNearlyReached]: [Warning],
        "Raise the flag of the bound, or find the clients that need so much.";

    /// Keys and bytes in etcd, and the rate of revisions.
    KeyspaceMeasured = "keyspace-measured" of Keyspace in [Doctor]: [Good], "";
    /// Calls that the examination has cost etcd.
    ExaminationCost = "examination-cost" of Keyspace in [Doctor]: [Good], "";
    /// The keys of etcd cannot be counted.
    KeysNotCounted = "keys-not-counted" of Keyspace in [Doctor]: [Bad],
        "check etcd first: rangecache's own load would fail the same way";
    /// etcd was never compacted, and has many revisions.
    NeverCompacted = "never-compacted" of Keyspace in [Doctor]: [Warning],
        "set etcd's --auto-compaction-retention; otherwise its database grows without bound";
    /// Revision up to which etcd is compacted.
    Compacted = "compacted" of Keyspace in [Doctor]: [Good], "";
    /// `--cache-max-bytes` is more than the memory of the machine or container: the process is ended for lack of memory before its
    /// mirrors reach their bound.
    BudgetAboveMemory = "budget-above-memory" of Memory in [Status, Doctor] alerts [BudgetAboveMemory]: [Bad],
        "Lower --cache-max-bytes to three quarters of the memory limit, or raise that; doctor sees the limit of where it runs.";
    /// The keys fit into `--cache-max-bytes`, and not all values.
    MemoryForKeysOnly = "memory-for-keys-only" of Memory in [Doctor]: [Warning],
        "raise --cache-max-bytes, or mirror less (--cache-prefix, --no-cache-prefix)";
    /// The mirrors do not fit into `--cache-max-bytes`, and are disabled (over budget).
    MemoryTooSmall = "memory-too-small" of Memory in [Doctor]: [Bad],
        "raise --cache-max-bytes, or mirror less (--cache-prefix, --no-cache-prefix)";
    /// The mirrors need more than 90 % of `--cache-max-bytes`.
    MemoryTight = "memory-tight" of Memory in [Doctor]: [Warning],
        "raise --cache-max-bytes and the memory limit before it grows, keep less history (--history-max-bytes), or mirror less";
    /// The mirrors fit into `--cache-max-bytes`.
    MemorySuffices = "memory-suffices" of Memory in [Doctor]: [Good], "";
    /// Kubernetes' events take a tenth of the memory or more; `--no-cache-prefix` leaves them out.
    EventsAreLarge = "events-are-large" of Memory in [Doctor]: [Good], "";

    /// The number of watches is not known: etcd's metrics cannot be read at its client URLs.
    WatchesUnknown = "watches-unknown" of Watches in [Doctor]: [Note], "";
    /// Watchers and streams on the members.
    WatchesCounted = "watches-counted" of Watches in [Doctor]: [Good], "";
    /// Watchers that etcd would have less.
    WatchesSaved = "watches-saved" of Watches in [Doctor]: [Good], "";

    /// Keys that would be mirrored.
    KeysMirrored = "keys-mirrored" of Verdict in [Doctor]: [Good], "";
    /// There is no key under a prefix of `--no-cache-prefix`: it may be mistyped.
    ExclusionUseless = "exclusion-useless" of Verdict in [Doctor]: [Note],
        "compare it with the existing prefixes";
    /// No key would be mirrored.
    NothingMirrored = "nothing-mirrored" of Verdict in [Doctor]: [Warning],
        "check --cache-prefix";
    /// Lists cost etcd little: there is little to gain.
    LittleToGain = "little-to-gain" of Verdict in [Doctor]: [Warning],
        "use rangecache only if very many clients read at the same time";
    /// Lists, pages and counts benefit.
    ListsBenefit = "lists-benefit" of Verdict in [Doctor]: [Good], "";
    /// Many concurrent reads of single keys benefit, one read at a time does not.
    SingleReadsBenefit = "single-reads-benefit" of Verdict in [Doctor]: [Good], "";
    /// Nothing would be answered from memory, because the keys could not be read.
    NothingFromMemory = "nothing-from-memory" of Verdict in [Doctor]: [Bad],
        "fix the problems above";
    /// Some or all reads would be forwarded because of the findings that are bad.
    NotReady = "not-ready" of Verdict in [Doctor]: [Bad],
        "fix the problems above";
    /// rangecache would serve this etcd with these flags.
    Ready = "ready" of Verdict in [Doctor]: [Good], "";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_are_unique_and_in_kebab_case() {
        let ids: BTreeSet<&str> = FindingId::ALL.iter().map(|id| id.as_str()).collect();
        assert_eq!(ids.len(), FindingId::ALL.len());
        for id in ids {
            let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase());
            assert!(id.split('-').all(is_word), "{id}");
        }
    }

    #[test]
    fn finding_that_needs_action_has_a_remedy() {
        for id in FindingId::ALL {
            let needs_action = id
                .severities()
                .iter()
                .any(|severity| *severity >= Severity::Warning);
            assert!(!needs_action || !id.remedy().is_empty(), "{id:?}");
            assert!(id.meaning().ends_with('.'), "{id:?}");
        }
    }
}
