//! What a snapshot consists of. In version 1 of the store the text on disk is a record of [`checked_json`]; the
//! manifest objects of packed stores are in [`crate::sealed`].

use crate::checked_json::{self, NotIt};
use crate::chunk::Chunk;
use crate::{Damage, ReadError, RelPath, RelPathError, SnapshotId};
use serde::{Deserialize, Serialize};

/// The newest version that this build reads, and what it writes for a snapshot with device memory.
pub const MANIFEST_VERSION: u32 = 2;
/// What it writes for any other: older builds restore those as well as this one.
const VERSION_WITHOUT_DEVICE_MEMORY: u32 = 1;

/// One snapshot: what job it is of, what has to be put back besides CRIU's images, and every data file with its
/// checksum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Layout version, at most [`MANIFEST_VERSION`]; see [`Manifest::version_for`].
    pub version: u32,
    /// The snapshot's name, also its directory's.
    pub id: SnapshotId,
    /// The job.
    pub job: JobIdentity,
    /// Which start-from-the-beginning of the job it belongs to, from 1.
    pub run: u64,
    /// When the job stood still, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// How long the job stood still, seconds, as CRIU measured it.
    pub stall_s: f64,
    /// The machine it was taken on.
    pub host: HostFacts,
    /// Version of the ckpt-run that took it.
    pub ckpt_run_version: String,
    /// Version of the CRIU that took it.
    pub criu_version: String,
    /// The process tree, in the numbers of its PID namespace.
    pub tree: ProcessTree,
    /// Where the job's standard streams went.
    pub stdio: Vec<StdioRecord>,
    /// The job's controlling terminal, if it had one.
    pub tty: Option<TtyRecord>,
    /// Regular files that the job held open for writing.
    pub open_files: Vec<OpenFile>,
    /// Files in /dev/shm that the job held open for writing: their content is in the snapshot.
    pub shm_files: Vec<SavedFile>,
    /// Small files on disk that the job held open for writing: their content is in the snapshot, for when they are gone
    /// by the time of a restore.
    pub spare_files: Vec<SavedFile>,
    /// Directories that have to be there for a restore: of unix sockets and of files that were open for writing.
    pub directories: Vec<Directory>,
    /// Second names of files that CRIU wants to find for the time of a restore.
    pub links: Vec<LinkedFile>,
    /// What processes of the job had on their GPUs, in device memory that is not in CRIU's images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<GpuProcess>,
    /// What it brought to the store, bytes: the rest was there. Unknown in version 1 of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// Every data file of the snapshot.
    pub files: Vec<DataFile>,
}

/// Which job a snapshot is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobIdentity {
    /// The job's directory in the store.
    pub key: String,
    /// Working directory of the command.
    pub cwd: String,
    /// The command line; bytes that are not UTF-8 are replaced.
    pub argv: Vec<String>,
}

/// The machine a snapshot was taken on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Its name.
    pub hostname: String,
    /// Kernel release.
    pub kernel: String,
    /// Hardware name, `x86_64`.
    pub arch: String,
    /// CPU model.
    pub cpu: String,
    /// The kernel's boot ID: tells whether the machine was started again since.
    pub boot_id: String,
}

/// The dumped process tree. All IDs are as the job itself sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessTree {
    /// Root of the tree: the reaper.
    pub root_pid: i32,
    /// The user's command.
    pub command_pid: i32,
    /// The last PID given out in the namespace.
    pub last_pid: i32,
    /// Processes and threads counted.
    pub threads: u64,
    /// CPU affinity, which CRIU does not keep.
    pub affinity: Vec<AffinityGroup>,
    /// The interposer's agents, which connect again when the job runs on.
    pub agents: Option<AgentsRecord>,
}

/// The agents that were asked to disconnect for the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentsRecord {
    /// The number of the attempt, by which they know what they come back from.
    pub attempt: u64,
    /// Their processes.
    pub pids: Vec<u32>,
}

/// Threads that may run on the same CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AffinityGroup {
    /// CPU numbers.
    pub cpus: Vec<u32>,
    /// Thread IDs.
    pub tids: Vec<i32>,
}

/// What kind of thing stands behind a standard stream of the job.
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
    /// What it was.
    pub kind: StdioKind,
    /// For a pipe: its inode number, the name under which CRIU knows it.
    pub inode: u64,
    /// For an output that the launcher wrote to a regular file: the file and its length at the snapshot.
    pub file: Option<OpenFile>,
    /// For an input that the launcher read from a regular file: how much of it the job had taken.
    pub consumed_bytes: Option<u64>,
}

/// The terminal that the launcher relays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtyRecord {
    /// Device number of the terminal, as CRIU names it.
    pub rdev: u64,
    /// Device number of the file system it lies on.
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

/// A directory that is made anew if it is gone.
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

/// A file that was open under a name that it does not have any more, while it has another: CRIU finds it again by a
/// name of its own, which it removes when the job runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkedFile {
    /// CRIU's name for it, absolute.
    pub path: String,
    /// The name that it has, absolute.
    pub target: String,
}

/// Device memory of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// The process, as the job itself sees it.
    pub pid: u32,
    /// The number of its mirror, by which the process knows what is in it.
    pub mirror: u64,
    /// Size of the mirror, bytes.
    pub mirror_bytes: u64,
    /// The data file with the mirror's content from its beginning; the rest is not in use. `None` when nothing is.
    pub memory: Option<RelPath>,
    /// The data file that says what lies where in it.
    pub report: RelPath,
}

/// One data file of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// Relative to the snapshot's directory.
    pub path: RelPath,
    /// Length, bytes.
    pub bytes: u64,
    /// BLAKE3 of the content, lower-case hex: in version 1 of the store only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Its chunks, in order: in a packed store only. They are in a table of their own beside the JSON.
    #[serde(skip)]
    pub chunks: Vec<Chunk>,
}

impl Manifest {
    /// The manifest of a snapshot of which nothing is known but its name and its job: the first run's, without content.
    #[must_use]
    pub fn new(id: SnapshotId, job: JobIdentity) -> Self {
        Self {
            version: Self::version_for(&[]),
            id,
            job,
            run: 1,
            taken_unix_ms: 0,
            stall_s: 0.0,
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
            gpu: Vec::new(),
            stored_bytes: None,
            files: Vec::new(),
        }
    }

    /// The version to write for a snapshot with this device memory.
    #[must_use]
    pub fn version_for(gpu: &[GpuProcess]) -> u32 {
        if gpu.is_empty() { VERSION_WITHOUT_DEVICE_MEMORY } else { MANIFEST_VERSION }
    }

    /// The text to store.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        checked_json::encode(self)
    }

    /// Reads what [`Manifest::encode`] wrote for the snapshot `id`: checksum first, then version, then the rest.
    ///
    /// # Errors
    /// [`ReadError::Damaged`], [`ReadError::Newer`] or [`ReadError::Hostile`].
    pub fn decode(id: &SnapshotId, text: &[u8]) -> Result<Self, ReadError> {
        let damaged = |damage| ReadError::Damaged { id: id.to_string(), damage };
        let body = checked_json::open(text).map_err(|error| match error {
            NotIt::Checksum { found, recorded } => damaged(Damage::ManifestChecksum { found, recorded }),
            other => damaged(Damage::Manifest(other.to_string())),
        })?;
        Self::from_body(id, body)
    }

    /// Reads the JSON of the snapshot `id`: version first, then the rest.
    ///
    /// # Errors
    /// As [`Manifest::decode`].
    pub(crate) fn from_body(id: &SnapshotId, body: &str) -> Result<Self, ReadError> {
        let damaged = |damage| ReadError::Damaged { id: id.to_string(), damage };
        Self::check_version(id, body)?;
        let hostile = |source| ReadError::Hostile { id: id.to_string(), source };
        let manifest: Self =
            serde_json::from_str(body).map_err(|error| match RelPathError::within(&error) {
                // Somebody's doing, as opposed to text that does not parse.
                Some(source) => hostile(source),
                None => damaged(Damage::Manifest(error.to_string())),
            })?;
        manifest.check_shared_memory().map_err(hostile)?;
        if &manifest.id != id {
            return Err(damaged(Damage::WrongId(manifest.id.to_string())));
        }
        Ok(manifest)
    }

    fn check_version(id: &SnapshotId, body: &str) -> Result<(), ReadError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let damaged = |error: serde_json::Error| ReadError::Damaged {
            id: id.to_string(),
            damage: Damage::Manifest(error.to_string()),
        };
        let Version { version } = serde_json::from_str(body).map_err(damaged)?;
        if version > MANIFEST_VERSION {
            return Err(ReadError::Newer { id: id.to_string(), found: version, known: MANIFEST_VERSION });
        }
        Ok(())
    }

    /// What shared memory is put back over lies in /dev/shm, wherever the manifest comes from.
    fn check_shared_memory(&self) -> Result<(), RelPathError> {
        for file in &self.shm_files {
            let below = file.path.strip_prefix("/dev/shm/").ok_or_else(|| RelPathError(file.path.clone()))?;
            RelPath::new(below).map_err(|_| RelPathError(file.path.clone()))?;
        }
        Ok(())
    }

    /// Bytes of all data files together.
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
    fn reads_what_it_wrote() {
        let manifest = sample(3);
        assert_eq!(Manifest::decode(&manifest.id, &manifest.encode()).unwrap(), manifest);
    }

    #[test]
    fn device_memory_is_for_those_who_know_of_it() {
        let gpu = GpuProcess {
            pid: 7,
            mirror: 9,
            mirror_bytes: 4,
            memory: Some(RelPath::new("gpu/7.mem").unwrap()),
            report: RelPath::new("gpu/7.json").unwrap(),
        };
        let without = sample(3);
        assert_eq!(without.version, 1, "the builds before may restore it");
        assert!(!String::from_utf8(without.encode()).unwrap().contains("gpu"));
        let gpu = vec![gpu];
        let with = Manifest { version: Manifest::version_for(&gpu), gpu, ..without };
        assert_eq!(with.version, 2);
        assert_eq!(Manifest::decode(&with.id, &with.encode()).unwrap(), with);
        for key in ["memory", "report"] {
            let climbing = resealed(&with, |body| body["gpu"][0][key] = "../../etc/passwd".into());
            let read = Manifest::decode(&with.id, &climbing);
            assert!(matches!(read, Err(ReadError::Hostile { .. })), "{key}: {read:?}");
        }
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
        let newer = resealed(&manifest, |body| body["version"] = 3.into());
        assert!(matches!(Manifest::decode(&manifest.id, &newer), Err(ReadError::Newer { found: 3, .. })));
        let climbing = resealed(&manifest, |body| body["files"][0]["path"] = "../../etc/passwd".into());
        assert!(matches!(Manifest::decode(&manifest.id, &climbing), Err(ReadError::Hostile { .. })));
        let shm = serde_json::json!([{"path": "/dev/shm/../../etc/x", "data": "shm/0", "mode": 0, "uid": 0, "gid": 0}]);
        let climbing = resealed(&manifest, |body| body["shm_files"] = shm);
        assert!(matches!(Manifest::decode(&manifest.id, &climbing), Err(ReadError::Hostile { .. })));
    }

    /// As [`resealed`], with the text of the body.
    fn retyped(manifest: &Manifest, change: impl FnOnce(String) -> String) -> Vec<u8> {
        let body = change(serde_json::to_string(manifest).unwrap());
        format!(r#"{{"checksum":"{}","body":{body}}}"#, blake3::hash(body.as_bytes()).to_hex()).into_bytes()
    }

    #[test]
    fn nothing_in_a_manifest_makes_its_paths_go_unchecked() {
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
        // Fields that are skipped, as a newer version may have them.
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
