//! The manifest of a snapshot. Version 1 of the store keeps it as a [`checked_json`] record; packed stores keep it in
//! the objects of [`crate::sealed`].

use crate::checked_json::{self, InvalidRecord};
use crate::chunk::Chunk;
use crate::store::damaged;
use crate::{Damage, ReadError, RelPath, RelPathError, SnapshotId};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The newest version that this build reads; written for parts of snapshots of jobs on several nodes.
pub const MANIFEST_VERSION: u32 = 5;
/// Written for snapshots with processes that are parked at a cut.
const VERSION_WITH_CUT: u32 = 4;
/// Written for snapshots with an inventory of the job's files.
const VERSION_WITH_INVENTORY: u32 = 3;
/// Written for snapshots with device memory.
const VERSION_WITH_DEVICE_MEMORY: u32 = 2;
/// Written for all other snapshots, so that older builds can restore them.
const FIRST_VERSION: u32 = 1;

/// One snapshot: its job, the state that CRIU's images do not cover, and every data file with its checksum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Layout version, at most [`MANIFEST_VERSION`]; see [`Manifest::least_version`].
    pub version: u32,
    /// The snapshot's ID, which is also the name of its object or directory.
    pub id: SnapshotId,
    /// The job.
    pub job: JobIdentity,
    /// The run of the job (start from the beginning) that it belongs to, from 1.
    pub run: u64,
    /// When the job was frozen, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// How long the job was frozen, seconds, as measured by CRIU.
    pub stall_s: f64,
    /// What the consistent cut has taken. `None` if no process had a communicator of NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<CutRecord>,
    /// The machine it was taken on.
    pub host: HostFacts,
    /// Version of the ckpt-run that took it.
    pub ckpt_run_version: String,
    /// Version of the CRIU that took it.
    pub criu_version: String,
    /// The process tree, with the IDs of its PID namespace.
    pub tree: ProcessTree,
    /// The job's standard streams.
    pub stdio: Vec<StdioRecord>,
    /// The job's controlling terminal, if it had one.
    pub tty: Option<TtyRecord>,
    /// Regular files that the job held open for writing.
    pub open_files: Vec<OpenFile>,
    /// Files in /dev/shm that the job held open for writing. Their content is in the snapshot.
    pub shm_files: Vec<SavedFile>,
    /// Small files on disk that the job held open for writing. Their content is in the snapshot, in case they are
    /// missing at a restore.
    pub spare_files: Vec<SavedFile>,
    /// Directories that a restore needs: those of unix sockets and of files that were open for writing.
    pub directories: Vec<Directory>,
    /// Hard links that CRIU expects during a restore.
    pub links: Vec<LinkedFile>,
    /// The data file with the inventory of the job's files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inventory: Option<RelPath>,
    /// Set for a part of a snapshot of a job on several nodes. It is worth nothing without the other parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<NodePart>,
    /// Device memory of the job's processes that is not in CRIU's images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<GpuProcess>,
    /// A process of the job that had failed when the job was frozen, or some time before: the job itself may be about to
    /// fail, see [`crate::choose_prunable`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_process: Option<FailedProcess>,
    /// Bytes that it added to the store; the rest was shared with older snapshots. Unknown in version 1 of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// The content of which the store had no copy before, bytes, uncompressed: what has changed since older snapshots. Not
    /// in snapshots of older builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_bytes: Option<u64>,
    /// Every data file of the snapshot.
    pub files: Vec<DataFile>,
}

/// A process of the job that has ended with a signal or an exit code other than 0. Its parent may not know that yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedProcess {
    /// Its PID in the job's PID namespace.
    pub pid: u32,
    /// The name of its program, at most 15 bytes.
    pub name: String,
    /// Its exit code; 128 and the number of the signal that killed it.
    pub code: i32,
}

/// What it took until all ranks of NCCL stood at the same step. Their processes are parked in the snapshot: they run on
/// when the launcher that restores them says so.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CutRecord {
    /// From the request to the cut, seconds. It is not part of the stall, except for the last attempt.
    pub duration_s: f64,
    /// Number of attempts.
    pub attempts: u32,
}

/// Which part of which snapshot of a job on several nodes it is. The snapshot exists if the log has its global manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePart {
    /// The name of the log, which is in the store of node 0.
    pub log: String,
    /// The epoch of the checkpoint.
    pub epoch: u64,
    /// Its number in the epoch.
    pub attempt: u64,
    /// The node, from 0.
    pub node: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Addresses of this node that its connections to other machines use. A restore needs them.
    pub addresses: Vec<IpAddr>,
    /// Local ports of the job's sockets that reach other machines. A restore blocks them until all parts are restored.
    pub ports: Vec<u16>,
    /// The network of the job's own, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<PartNetwork>,
}

/// What a part sees of a network of the job's own (`--network job`). It is the same on whatever machine the part runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartNetwork {
    /// The addresses of the network, such as `198.18.3.8/29`. Node 0 has the first one, and so on.
    pub subnet: String,
    /// The name of the machine, as this part sees it: that of the machine on which it began.
    pub hostname: String,
    /// The names of each node, which its address in this network has.
    pub names: Vec<Vec<String>>,
}

/// The job of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobIdentity {
    /// The name of the job's directory in the store.
    pub key: String,
    /// Working directory of the command.
    pub cwd: String,
    /// The command line; bytes that are not UTF-8 are replaced.
    pub argv: Vec<String>,
}

/// The machine a snapshot was taken on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Its host name.
    pub hostname: String,
    /// Kernel release.
    pub kernel: String,
    /// Architecture, such as `x86_64`.
    pub arch: String,
    /// CPU model.
    pub cpu: String,
    /// The kernel's boot ID, which changes with every boot.
    pub boot_id: String,
}

/// The dumped process tree. All IDs are those of the job's PID namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessTree {
    /// Root of the tree: the reaper.
    pub root_pid: i32,
    /// The user's command.
    pub command_pid: i32,
    /// The last PID allocated in the namespace.
    pub last_pid: i32,
    /// Number of threads of all processes.
    pub threads: u64,
    /// CPU affinity, which CRIU does not save.
    pub affinity: Vec<AffinityGroup>,
    /// Eventfds of which CRIU restores only the lower 32 bits of the count. Not in snapshots of older builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub event_counters: Vec<EventCounter>,
    /// Options of sockets that CRIU does not restore. Not in snapshots of older builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub socket_options: Vec<SocketOptions>,
    /// The interposer's agents, which reconnect when the job continues.
    pub agents: Option<AgentsRecord>,
    /// Memory of each process except the reaper, by its ID. Not in snapshots of older builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ProcessMemory>,
    /// The directory in which the reaper's program was; absent in snapshots of older builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_dir: Option<String>,
}

/// How much memory a process had when it was frozen. For people: nothing depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Its PID in the job's PID namespace.
    pub pid: i32,
    /// The name of its program, at most 15 bytes; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Anonymous memory, also swapped or in huge pages, bytes.
    pub private_bytes: u64,
    /// Pages of shared memory in its page table, bytes. Those of several processes count for each of them.
    pub shared_bytes: u64,
    /// Device memory that ckpt-run saves, bytes.
    #[serde(default)]
    pub device_bytes: u64,
}

/// The agents that disconnected for the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentsRecord {
    /// The number of the checkpoint attempt, which the agents repeat when they reconnect.
    pub attempt: u64,
    /// Their processes.
    pub pids: Vec<u32>,
    /// The path of the socket at which they look for the launcher; empty in snapshots of older builds.
    #[serde(default)]
    pub socket: String,
}

/// Threads with the same CPU affinity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AffinityGroup {
    /// CPU numbers.
    pub cpus: Vec<u32>,
    /// Thread IDs.
    pub tids: Vec<i32>,
}

/// The part of an eventfd's count that CRIU does not restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventCounter {
    /// A process that has the eventfd.
    pub pid: i32,
    /// Its descriptor.
    pub fd: i32,
    /// The upper 32 bits of the count.
    pub high: u32,
}

/// The options of a socket that are not those of a new one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptions {
    /// A process that has the socket.
    pub pid: i32,
    /// Its descriptor.
    pub fd: i32,
    /// The options.
    pub options: Vec<SocketOption>,
}

/// An option of a socket, see setsockopt(2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOption {
    /// The level.
    pub level: i32,
    /// The option's number at this level.
    pub name: i32,
    /// The value, as the kernel returns it; the name of a network interface instead of its number.
    pub value: Vec<u8>,
}

/// The type of a standard stream of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StdioKind {
    /// A pipe to or from the launcher.
    Pipe,
    /// The job's terminal, relayed by the launcher.
    Tty,
}

/// One standard stream of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdioRecord {
    /// Descriptor number in the job: 0, 1 or 2.
    pub fd: u32,
    /// Its type.
    pub kind: StdioKind,
    /// For a pipe: its inode number, by which CRIU identifies it.
    pub inode: u64,
    /// For an output that the launcher wrote to a regular file: the file and its length at the snapshot.
    pub file: Option<OpenFile>,
    /// For an input that the launcher read from a regular file: how much of it the job had consumed.
    pub consumed_bytes: Option<u64>,
    /// For an input of which the job had consumed something: what a resume compares its own with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<InputRecord>,
}

/// The input that a job had consumed from a file or a pipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputRecord {
    /// How much it had consumed.
    pub consumed_bytes: u64,
    /// Of a regular file: the BLAKE3 hash of the last 64 KiB of that, or of all of it, hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_hash: Option<String>,
    /// Of a regular file: whether it had consumed all of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_all: bool,
}

/// The terminal that the launcher relays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtyRecord {
    /// Device number of the terminal, as in CRIU's images.
    pub rdev: u64,
    /// Device number of its file system.
    pub dev: u64,
}

/// A regular file that was open for writing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFile {
    /// Absolute path.
    pub path: String,
    /// Its length at the snapshot, bytes.
    pub size_bytes: u64,
}

/// A file whose content is in the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFile {
    /// Absolute path.
    pub path: String,
    /// The data file that holds the content.
    pub data: RelPath,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A directory that a restore creates if it is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// Absolute path.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A file whose name at the time of `open` was removed, but which has another hard link. CRIU finds the file by a
/// temporary link, which it removes when the job continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkedFile {
    /// CRIU's temporary link, absolute.
    pub path: String,
    /// The existing name of the file, absolute.
    pub target: String,
}

/// Device memory of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its PID in the job's PID namespace.
    pub pid: u32,
    /// The number of its mirror, by which the process recognises the mirror's content.
    pub mirror: u64,
    /// Size of the mirror, bytes.
    pub mirror_bytes: u64,
    /// How much memory the mirror needs, bytes: the process leaves holes for chunks of zeroes. `None` if it needs all of it,
    /// as in snapshots of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror_used_bytes: Option<u64>,
    /// Whether the restored process can load the content of its mirror in parts, without one. Not in snapshots of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supports_loads: bool,
    /// The data file with the used part of the mirror, from its beginning. `None` if no part is used.
    pub memory: Option<RelPath>,
    /// The data file with the layout of the mirror.
    pub report: RelPath,
    /// The GPUs that the driver knows in the process, in the machine's order, also those that the process does not use.
    /// Empty if they are not known, and in snapshots of older builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuRecord>,
}

/// A GPU, and what a process takes of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuRecord {
    /// Its UUID as NVML writes it.
    pub uuid: String,
    /// Its type as NVML names it.
    pub name: String,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Memory that ckpt-run puts back on it, bytes.
    #[serde(default)]
    pub captured_bytes: u64,
    /// Memory that the driver's restore takes on it, bytes; `None` if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_bytes: Option<u64>,
}

impl GpuRecord {
    /// What a restore takes on it, bytes.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        self.captured_bytes.saturating_add(self.driver_bytes.unwrap_or(0))
    }
}

/// One data file of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// Relative to the snapshot's directory.
    pub path: RelPath,
    /// Length, bytes.
    pub bytes: u64,
    /// BLAKE3 of the content in lower-case hex; only in version 1 of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Its chunks, in order; only in a packed store. They are stored in a table after the JSON.
    #[serde(skip)]
    pub chunks: Vec<Chunk>,
}

impl Manifest {
    /// An empty manifest with this ID and job, of the first run.
    #[must_use]
    pub fn new(id: SnapshotId, job: JobIdentity) -> Self {
        Self {
            version: FIRST_VERSION,
            id,
            job,
            run: 1,
            taken_unix_ms: 0,
            stall_s: 0.0,
            cut: None,
            host: HostFacts::default(),
            ckpt_run_version: String::new(),
            criu_version: String::new(),
            tree: ProcessTree::default(),
            stdio: Vec::new(),
            tty: None,
            open_files: Vec::new(),
            shm_files: Vec::new(),
            spare_files: Vec::new(),
            directories: Vec::new(),
            links: Vec::new(),
            inventory: None,
            part: None,
            gpu: Vec::new(),
            failed_process: None,
            stored_bytes: None,
            changed_bytes: None,
            files: Vec::new(),
        }
    }

    /// Whether a process of the job had failed before: the job may be about to fail.
    #[must_use]
    pub fn is_doubtful(&self) -> bool {
        self.failed_process.is_some()
    }

    /// The oldest version that has what this manifest has.
    #[must_use]
    pub fn least_version(&self) -> u32 {
        match (&self.cut, &self.inventory, &self.gpu[..]) {
            _ if self.part.is_some() => MANIFEST_VERSION,
            (Some(_), ..) => VERSION_WITH_CUT,
            (None, Some(_), _) => VERSION_WITH_INVENTORY,
            (None, None, []) => FIRST_VERSION,
            (None, None, _) => VERSION_WITH_DEVICE_MEMORY,
        }
    }

    /// A hash of all that is in the snapshot, lower-case hexadecimal: of the manifest and the names of its chunks.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    #[must_use]
    pub fn content_hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&serde_json::to_vec(self).expect("a manifest has a JSON form"));
        for chunk in self.files.iter().flat_map(|file| &file.chunks) {
            hasher.update(&chunk.id.0).update(&chunk.bytes.to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Encodes the manifest as version 1 of the store keeps it.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        checked_json::encode_body(checked_json::body(self))
    }

    /// Decodes the output of [`Manifest::encode`] for the snapshot `id`: first the checksum, then the version, then the
    /// rest.
    ///
    /// # Errors
    /// [`ReadError::Damaged`], [`ReadError::Newer`] or [`ReadError::Hostile`].
    pub fn decode(id: &SnapshotId, text: &[u8]) -> Result<Self, ReadError> {
        let body = checked_json::open(text).map_err(|error| match error {
            InvalidRecord::Checksum { found, recorded } => {
                damaged(id, Damage::ManifestChecksum { found, recorded })
            }
            other => damaged(id, Damage::Manifest(other.to_string())),
        })?;
        Self::from_body(id, body)
    }

    /// Decodes the JSON of the snapshot `id`: first the version, then the rest.
    ///
    /// # Errors
    /// As [`Manifest::decode`].
    pub(crate) fn from_body(id: &SnapshotId, body: &str) -> Result<Self, ReadError> {
        let unreadable = |error: serde_json::Error| damaged(id, Damage::Manifest(error.to_string()));
        let found = checked_json::version(body).map_err(unreadable)?;
        if found > MANIFEST_VERSION {
            return Err(ReadError::Newer { id: id.to_string(), found, known: MANIFEST_VERSION });
        }
        let hostile = |source| ReadError::Hostile { id: id.to_string(), source };
        let manifest: Self =
            serde_json::from_str(body).map_err(|error| match RelPathError::within(&error) {
                // Not damage: somebody has changed the manifest.
                Some(source) => hostile(source),
                None => unreadable(error),
            })?;
        manifest.check_shared_memory().map_err(hostile)?;
        if &manifest.id != id {
            return Err(damaged(id, Damage::WrongId(manifest.id.to_string())));
        }
        Ok(manifest)
    }

    /// A restore overwrites these files, so they must be in /dev/shm even if the manifest is hostile.
    fn check_shared_memory(&self) -> Result<(), RelPathError> {
        for file in &self.shm_files {
            let below = file.path.strip_prefix("/dev/shm/").ok_or_else(|| RelPathError(file.path.clone()))?;
            RelPath::new(below).map_err(|_| RelPathError(file.path.clone()))?;
        }
        Ok(())
    }

    /// Total length of all data files (bytes).
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    pub(crate) fn sample(sequence: u64) -> Manifest {
        let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec!["true".into()] };
        Manifest {
            stall_s: 0.25,
            ckpt_run_version: "0".into(),
            criu_version: "4.1.1".into(),
            files: vec![DataFile {
                path: RelPath::new("images/a.img").unwrap(),
                bytes: 3,
                blake3: Some("00".into()),
                chunks: Vec::new(),
            }],
            ..Manifest::new(SnapshotId::new(sequence, UNIX_EPOCH), job)
        }
    }

    fn resealed(manifest: &Manifest, change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
        let mut body = serde_json::to_value(manifest).unwrap();
        change(&mut body);
        let body = body.to_string();
        format!(r#"{{"checksum":"{}","body":{body}}}"#, blake3::hash(body.as_bytes()).to_hex()).into_bytes()
    }

    #[test]
    fn a_manifest_round_trips() {
        let manifest = sample(3);
        assert_eq!(Manifest::decode(&manifest.id, &manifest.encode()).unwrap(), manifest);
    }

    #[test]
    fn device_memory_raises_the_version() {
        let gpu = GpuProcess {
            pid: 7,
            mirror: 9,
            mirror_bytes: 4,
            mirror_used_bytes: Some(2),
            supports_loads: true,
            memory: Some(RelPath::new("gpu/7.mem").unwrap()),
            report: RelPath::new("gpu/7.json").unwrap(),
            gpus: Vec::new(),
        };
        let without = sample(3);
        assert_eq!(without.version, 1, "older builds may restore it");
        assert!(!String::from_utf8(without.encode()).unwrap().contains("gpu"));
        let gpu = vec![gpu];
        let mut with = Manifest { gpu, ..without };
        with.version = with.least_version();
        assert_eq!(with.version, 2);
        assert_eq!(Manifest::decode(&with.id, &with.encode()).unwrap(), with);
        let cut = Some(CutRecord { duration_s: 0.5, attempts: 2 });
        let mut parked = Manifest { cut, ..with.clone() };
        parked.version = parked.least_version();
        assert_eq!(parked.version, VERSION_WITH_CUT, "older builds would leave its processes parked");
        assert_eq!(Manifest::decode(&parked.id, &parked.encode()).unwrap(), parked);
        let part = NodePart {
            log: "000001-a".into(),
            epoch: 1,
            attempt: 2,
            node: 1,
            nodes: 2,
            addresses: vec!["10.0.0.1".parse().unwrap()],
            ports: vec![80],
            network: None,
        };
        let mut part = Manifest { part: Some(part), ..parked };
        part.version = part.least_version();
        assert_eq!(part.version, MANIFEST_VERSION, "older builds would resume it without the other parts");
        let read = Manifest::decode(&part.id, &part.encode()).unwrap();
        assert_eq!((&read, read.content_hash()), (&part, part.content_hash()));
        for key in ["memory", "report"] {
            let climbing = resealed(&with, |body| body["gpu"][0][key] = "../../etc/passwd".into());
            let read = Manifest::decode(&with.id, &climbing);
            assert!(matches!(read, Err(ReadError::Hostile { .. })), "{key}: {read:?}");
        }
    }

    #[test]
    fn gpus_are_left_out_where_they_are_not_known() {
        let text = r#"{"pid":7,"mirror":9,"mirror_bytes":0,"memory":null,"report":"gpu/7.json"}"#;
        let old: GpuProcess = serde_json::from_str(text).unwrap();
        assert_eq!(old.gpus, []);
        assert_eq!(serde_json::to_string(&old).unwrap(), text);
        let gpu = r#"{"uuid":"GPU-1","name":"A","memory_bytes":9,"captured_bytes":4,"driver_bytes":3}"#;
        let gpu: GpuRecord = serde_json::from_str(gpu).unwrap();
        assert_eq!(gpu.needed_bytes(), 7);
        assert_eq!(GpuRecord { driver_bytes: None, ..gpu }.needed_bytes(), 4);
    }

    #[test]
    fn finds_every_flipped_bit() {
        let manifest = sample(3);
        let text = manifest.encode();
        for position in 0..text.len() {
            for bit in 0..8 {
                let mut flipped = text.clone();
                flipped[position] ^= 1 << bit;
                let read = Manifest::decode(&manifest.id, &flipped);
                assert!(
                    matches!(read, Err(ReadError::Damaged { .. })),
                    "byte {position} bit {bit}: {read:?}"
                );
            }
        }
    }

    #[test]
    fn finds_truncation_and_extra_bytes() {
        let manifest = sample(3);
        let text = manifest.encode();
        for length in 0..text.len() {
            assert!(Manifest::decode(&manifest.id, &text[..length]).is_err(), "{length}");
        }
        let mut longer = text;
        longer.push(b'\n');
        assert!(matches!(Manifest::decode(&manifest.id, &longer), Err(ReadError::Damaged { .. })));
    }

    #[test]
    fn refuses_newer_versions_and_hostile_paths() {
        let manifest = sample(3);
        let newer = resealed(&manifest, |body| body["version"] = 6.into());
        assert!(matches!(Manifest::decode(&manifest.id, &newer), Err(ReadError::Newer { found: 6, .. })));
        let climbing = resealed(&manifest, |body| body["files"][0]["path"] = "../../etc/passwd".into());
        assert!(matches!(Manifest::decode(&manifest.id, &climbing), Err(ReadError::Hostile { .. })));
        let shm = serde_json::json!([{"path": "/dev/shm/../../etc/x", "data": "shm/0", "mode": 0, "uid": 0, "gid": 0}]);
        let climbing = resealed(&manifest, |body| body["shm_files"] = shm);
        assert!(matches!(Manifest::decode(&manifest.id, &climbing), Err(ReadError::Hostile { .. })));
    }

    /// As [`resealed`], but changes the text of the body.
    fn retyped(manifest: &Manifest, change: impl FnOnce(String) -> String) -> Vec<u8> {
        let body = change(serde_json::to_string(manifest).unwrap());
        format!(r#"{{"checksum":"{}","body":{body}}}"#, blake3::hash(body.as_bytes()).to_hex()).into_bytes()
    }

    #[test]
    fn paths_are_checked_whatever_else_a_manifest_holds() {
        let shm = SavedFile {
            path: "/etc/passwd".into(),
            data: RelPath::new("shm/0").unwrap(),
            mode: 0o644,
            uid: 0,
            gid: 0,
        };
        let hostile = Manifest { shm_files: vec![shm], ..sample(3) };
        let is_refused = |change: &dyn Fn(String) -> String| {
            let read = Manifest::decode(&hostile.id, &retyped(&hostile, change));
            assert!(matches!(read, Err(ReadError::Hostile { .. } | ReadError::Damaged { .. })), "{read:?}");
        };
        is_refused(&|body| body);
        let twice = |field: &str| {
            let text = format!(r#""path":"/etc/passwd",{field},"#);
            is_refused(&|body| body.replace(r#""path":"/etc/passwd","#, &text));
        };
        // Unknown fields are skipped, since a newer version may add some.
        for field in [r#""memory":"a""#, r#""report":"a","data":"shm/0""#, r#""report":"a""#, r#""memory":1"#]
        {
            twice(field);
        }
        is_refused(&|body| {
            body.replace(r#""spare_files":[]"#, r#""spare_files":[],"gpu":[{"path":1,"memory":2}]"#)
        });
        is_refused(&|body| body.replace(r#""files":["#, r#""files":[{"path":"a","memory":"b","bytes":0},"#));
    }

    #[test]
    fn refuses_another_snapshots_manifest() {
        let text = sample(3).encode();
        let read = Manifest::decode(&sample(4).id, &text);
        assert!(matches!(read, Err(ReadError::Damaged { damage: Damage::WrongId(_), .. })), "{read:?}");
    }
}
