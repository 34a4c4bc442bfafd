//! The job's files at a snapshot: names, identities, and how each file's content can be got back. Stored in the snapshot
//! as JSON ([`INVENTORY`]).

use crate::sys::mounts::{OWN, read_mounts};
use crate::sys::path_text::{path_text, text_path};
use anyhow::{Context, Result, bail};
use ckpt_snapshot::{Manifest, RelPath, Store};
use procfs_core::process::MountInfo;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the inventory in a snapshot.
pub const INVENTORY: &str = "job-files.json";
const VERSION: u32 = 1;

/// A prefix is checked whole up to this length, otherwise at its two ends, if only appending writes were possible.
const EDGE_BYTES: u64 = 1 << 20;

/// The times of files are counted in ticks of up to 10 ms.
const TICK_NS: i64 = 20_000_000;
/// Some file systems have whole seconds only: ext4 with inodes of 128 bytes, as mkfs makes them for small disks; or even
/// seconds: FAT.
const COARSE_TICK_NS: i64 = 2_000_000_000;

/// Mount points that say nothing: services and schedulers give each job a directory for temporary files.
const OF_EACH_JOB: &[&str] = &["/", "/tmp", "/var/tmp"];

/// The job's files at a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// Version of the layout.
    pub version: u32,
    /// When the job was started from the beginning, nanoseconds since 1970 UTC.
    pub begun_ns: i64,
    /// When the files were recorded, nanoseconds since 1970 UTC. The job was frozen.
    pub recorded_ns: i64,
    /// Directories of which every file that is not excluded has an entry, subdirectories included.
    pub complete: Vec<String>,
    /// Files, directories and symbolic links by absolute path. Paths are texts, see [`crate::sys::path_text`].
    pub entries: BTreeMap<String, Entry>,
    /// The patterns of files that are not covered (`--files-exclude`).
    pub excluded: Vec<String>,
    /// What the rules cover, but the snapshot does not, with the reason.
    pub uncovered: BTreeMap<String, String>,
    /// Where the file systems of the working directory and of what the job has written are mounted, apart from `/`, those in
    /// memory, and directories for temporary files. Not in snapshots of older builds.
    #[serde(default)]
    pub mount_points: BTreeSet<String>,
}

/// One name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What it refers to.
    pub identity: Identity,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Whether the job has written it before the snapshot.
    pub written: bool,
    /// Whether the job had it open for writing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_open: bool,
    /// Whether its content could change without a new modification time: the job had it mapped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_mapped: bool,
    /// Its kind, and its content.
    pub kind: Kind,
}

/// The kind of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A regular file.
    File(Copies),
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(String),
    /// A FIFO.
    Fifo,
}

/// Where the content of a file is. With none of these, a changed file cannot be put back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// The data file of the snapshot with the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<RelPath>,
    /// The name in the snapshot's `held` directory, and what it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
    /// Checksum of the content: the file may have grown since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<Prefix>,
}

/// A second name or a copy of the file on its own file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The name in the `held` directory of the snapshot.
    pub name: String,
    /// A reflink has the content. A hard link has it for as long as nobody writes to the file.
    pub is_reflink: bool,
    /// What identifies the reflink, which nobody changes: not the file's identity. None for hard links, and in snapshots
    /// of older builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
}

/// A checksum of the content up to the length at the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    /// BLAKE3 in lower-case hex; none for a file of which only the length is known.
    pub blake3: Option<String>,
    /// Whether it covers all of the content, and not only its two ends.
    pub is_whole: bool,
}

/// What identifies a version of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Device number, which may be another one after a reboot.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Birth time where the file system has it, nanoseconds since 1970 UTC.
    pub born_ns: Option<i64>,
    /// Time of the last change of the inode.
    pub changed_ns: i64,
    /// Time of the last change of the content.
    pub modified_ns: i64,
    /// Length, bytes.
    pub bytes: u64,
    /// Number of hard links.
    pub links: u64,
}

impl Identity {
    /// The identity in the metadata of a file.
    #[must_use]
    pub fn of(meta: &Metadata) -> Self {
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            born_ns: meta.created().ok().map(nanoseconds),
            changed_ns: meta.ctime().saturating_mul(1_000_000_000).saturating_add(meta.ctime_nsec()),
            modified_ns: meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec()),
            bytes: meta.len(),
            links: meta.nlink(),
        }
    }

    /// The identity of the file at `path`; `None` if there is none.
    #[must_use]
    pub fn of_path(path: &Path) -> Option<Self> {
        fs::symlink_metadata(path).ok().as_ref().map(Self::of)
    }

    /// Whether both are the same inode. Device numbers are not compared: they may change with a reboot.
    #[must_use]
    pub fn is_same_inode(&self, other: &Self) -> bool {
        (self.ino, self.born_ns) == (other.ino, other.born_ns)
    }

    /// Whether neither content nor attributes have changed, as far as the file system's times show it.
    #[must_use]
    pub fn is_unchanged(&self, now: &Self) -> bool {
        self.is_same_inode(now) && self.changed_ns == now.changed_ns && self.has_same_content(now)
    }

    /// Whether the file may have changed after `recorded_ns` without a new time: it changed just before.
    #[must_use]
    pub fn may_change_unseen(&self, recorded_ns: i64) -> bool {
        may_be_since(self.changed_ns.max(self.modified_ns), recorded_ns)
    }

    /// Whether the content has not changed, as far as the file system's times show it.
    #[must_use]
    pub fn has_same_content(&self, now: &Self) -> bool {
        (self.modified_ns, self.bytes) == (now.modified_ns, now.bytes)
    }
}

impl Entry {
    /// The entry of a file, directory or symbolic link at `path`; `None` for other kinds.
    ///
    /// # Errors
    /// When a link cannot be read.
    pub fn of(path: &Path, meta: &Metadata) -> io::Result<Option<Self>> {
        let kind = match meta.file_type() {
            kind if kind.is_file() => Kind::File(Copies::default()),
            kind if kind.is_dir() => Kind::Directory,
            kind if kind.is_fifo() => Kind::Fifo,
            kind if kind.is_symlink() => Kind::Symlink(path_text(fs::read_link(path)?)),
            _ => return Ok(None),
        };
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        let identity = Identity::of(meta);
        Ok(Some(Self { identity, mode, uid, gid, written: false, is_open: false, is_mapped: false, kind }))
    }

    /// The copies of a regular file.
    #[must_use]
    pub fn copies(&self) -> Option<&Copies> {
        if let Kind::File(copies) = &self.kind { Some(copies) } else { None }
    }
}

impl Copies {
    /// Whether they show what the content was. A hard link does not.
    #[must_use]
    pub fn prove_content(&self) -> bool {
        self.data.is_some()
            || self.held.as_ref().is_some_and(|held| held.is_reflink)
            || self.prefix.as_ref().is_some_and(|prefix| prefix.blake3.is_some())
    }
}

impl Inventory {
    /// An inventory without entries.
    #[must_use]
    pub fn new(begun_ns: i64) -> Self {
        Self { version: VERSION, begun_ns, ..Self::default() }
    }

    /// Notes the mount points of the working directory and of the files that the job has written.
    pub fn note_mount_points(&mut self, cwd: &str) {
        let mounts = read_mounts(OWN).unwrap_or_default();
        let written = self.entries.iter().filter(|(_, entry)| entry.is_open || entry.written);
        let paths = written.map(|(path, _)| text_path(path));
        let dirs: BTreeSet<_> = paths
            .filter_map(|path| path.parent().map(Path::to_owned))
            .chain([text_path(cwd).into_owned()])
            .collect();
        let on_disk = |mount: &&MountInfo| !matches!(mount.fs_type.as_str(), "tmpfs" | "ramfs");
        // What is below a path follows it.
        let has_some = |point: &&Path| {
            dirs.range(point.to_path_buf()..).next().is_some_and(|dir| dir.starts_with(point))
        };
        let points = mounts.iter().filter(on_disk).map(|mount| mount.mount_point.as_path()).filter(has_some);
        self.mount_points =
            points.map(path_text).filter(|point| !OF_EACH_JOB.contains(&point.as_str())).collect();
    }

    /// Decodes the content of [`INVENTORY`].
    ///
    /// # Errors
    /// When it is not an inventory, or names a path that is not absolute and plain.
    pub fn decode(json: &[u8]) -> Result<Self> {
        let found: Self = serde_json::from_slice(json)?;
        if found.version != VERSION {
            bail!(
                "version {} of the list of files is not known: resume with a newer ckpt-run",
                found.version
            );
        }
        let is_plain = |path: &&String| {
            Path::new(path).is_absolute()
                && !Path::new(path).components().any(|part| part.as_os_str() == "..")
        };
        if let Some(path) = found.entries.keys().find(|path| !is_plain(path)) {
            bail!("the list of files has the path {path:?}, which is not absolute and plain");
        }
        Ok(found)
    }

    /// Reads the inventory of a snapshot; `None` for a snapshot of an older ckpt-run, which has none.
    ///
    /// # Errors
    /// Damage, or as [`Inventory::decode`].
    pub fn read(store: &dyn Store, manifest: &Manifest) -> Result<Option<Self>> {
        let Some(path) = &manifest.inventory else { return Ok(None) };
        let found = Self::decode(&store.read(manifest, path)?);
        found.map(Some).with_context(|| format!("cannot read {path} of the snapshot {}", manifest.id))
    }

    /// Whether `path` lies in a directory of which all files are known.
    #[must_use]
    pub fn is_complete_at(&self, path: &Path) -> bool {
        self.complete.iter().any(|dir| path.starts_with(text_path(dir)))
    }
}

impl Prefix {
    /// Checks the first `bytes` bytes of a file against the checksum.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn matches(&self, file: &mut File, bytes: u64) -> io::Result<bool> {
        let Some(expected) = &self.blake3 else { return Ok(true) };
        Ok(Self::of(file, bytes, self.is_whole)?.blake3.as_ref() == Some(expected))
    }

    /// The checksum of the first `bytes` bytes of a file: of all of them, or of the ends.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of(file: &mut File, bytes: u64, is_whole: bool) -> io::Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let mut add = |from: u64, to: u64| -> io::Result<()> {
            file.seek(io::SeekFrom::Start(from))?;
            let added = io::copy(&mut Read::take(&mut *file, to - from), &mut hasher)?;
            if added == to - from { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        };
        if is_whole || bytes <= 2 * EDGE_BYTES {
            add(0, bytes)?;
        } else {
            add(0, EDGE_BYTES)?;
            add(bytes - EDGE_BYTES, bytes)?;
        }
        Ok(Self { blake3: Some(hasher.finalize().to_hex().to_string()), is_whole })
    }
}

/// Whether a file with this time may have got it after a moment: times are those of the last tick.
#[must_use]
pub fn may_be_since(time_ns: i64, moment_ns: i64) -> bool {
    let tick_ns = if time_ns % 1_000_000_000 == 0 { COARSE_TICK_NS } else { TICK_NS };
    time_ns >= moment_ns.saturating_sub(tick_ns)
}

/// Nanoseconds since 1970 UTC.
#[must_use]
pub fn nanoseconds(time: SystemTime) -> i64 {
    let since = |time: SystemTime| time.duration_since(UNIX_EPOCH);
    since(time).map_or(0, |past| i64::try_from(past.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_last_tick() {
        let moment = 1_700_000_000_500_000_000;
        assert!(may_be_since(moment + 1, moment) && may_be_since(moment - 10_000_000, moment));
        assert!(!may_be_since(moment - 30_000_000, moment));
        // Whole seconds.
        assert!(may_be_since(1_700_000_000_000_000_000, moment));
        assert!(!may_be_since(1_699_999_998_000_000_000, moment));
    }
}
