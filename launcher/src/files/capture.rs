//! Records the job's files for a snapshot.
//!
//! ```text
//!   prepare (the job runs)     copies what has changed since the last snapshot
//!   freeze  (the job is frozen) copies what has changed since, and records every file
//! ```
//!
//! How a file's content is kept, the first that is possible:
//! 1. a file that has not changed since the last snapshot: as in the last snapshot;
//! 2. a file that is open for appending only: a checksum, since a resume only has to cut it;
//! 3. a copy in the snapshot, up to `--files-budget` bytes in all;
//! 4. a reflink beside the store, where the file system can do that;
//! 5. a hard link beside the store, for a file that is closed: its content survives deletion and replacement;
//! 6. a checksum, for a file that grows.
//!
//! A file for which none is possible is named in the snapshot, and a resume that needs its content is refused. So is one that
//! has a checksum only and was seen to change in place, or is mapped.

use crate::files::history::{ChunkNames, FileHistory, Known};
use crate::files::inventory::{
    Copies, Entry, Held, Identity, Inventory, Kind, Prefix, may_be_since, nanoseconds,
};
use crate::files::leases;
use crate::files::rules::FileRules;
use crate::files::saved::{copy_sparse, has_at_most};
use crate::files::sources::StagedFile;
use crate::files::staging::StagedDir;
use crate::files::tracking::Record;
use crate::files::walk::MountPoints;
use crate::namespace::{inside, numbers_in};
use crate::sys::deadline::FILE_RETRY_INTERVAL;
use crate::sys::path_text::{path_text, read_maps, shown, text_path};
use ckpt_snapshot::chunk::ChunkId;
use ckpt_snapshot::{RelPath, Source, faults, size_text};
use procfs_core::process::{MMPermissions, MMapPath, MemoryMap};
use rustix::fs::FsWord;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

/// The most files that a walk looks at.
const WALK_MAX: usize = 20_000;
/// Files that the job has not written are copied too, in case it will: up to this size each, and in all.
const UNWRITTEN_MAX_BYTES: u64 = 1 << 20;
const ALL_UNWRITTEN_MAX_BYTES: u64 = 64 << 20;
/// Files up to this size are copied even if a checksum would do.
const SMALL_BYTES: u64 = 1 << 20;
/// How often a file is copied that changes meanwhile: while the job is frozen, another program writes it.
const COPY_TRIES: usize = 3;
/// How often, for one snapshot, a file is read again after an error of the system: memory or descriptors may be short for a
/// moment only, and without the content of a file a resume may be refused. The job may be frozen meanwhile.
const MOST_RETRIES: u32 = 10;
/// The most that is read of one file for a checksum. The next snapshot continues.
const HASH_MAX_BYTES: u64 = 4 << 30;

/// The files that the job has open for writing or mapped, at one moment.
#[derive(Clone, Debug, Default)]
pub struct OpenForWriting {
    /// Absolute paths of files that are open for writing.
    pub writable: BTreeSet<String>,
    /// Those of them that are open for appending only.
    pub append_only: BTreeSet<String>,
    /// Absolute paths of files that are mapped shared and writable.
    pub mapped: BTreeSet<String>,
    /// Their inodes, which have other names too.
    pub mapped_inodes: HashSet<u64>,
    /// Absolute paths of the links that CRIU has made for the dump. They are no files of the job.
    pub criu_links: BTreeSet<String>,
}

/// The job's files while one snapshot is taken.
pub struct Capture<'a> {
    rules: &'a FileRules,
    history: &'a mut FileHistory,
    /// The job's root directory.
    root: PathBuf,
    /// The job's working directory.
    cwd: String,
    staged: &'a StagedDir,
    /// The directory of reflinks and hard links of this snapshot, made when it is needed.
    held: PathBuf,
    /// The file system that it is on. Links exist within one only.
    held_on: Option<FileSystem>,
    prepared: BTreeMap<String, FileCopy>,
    inventory: Inventory,
    contents: Vec<Content>,
    copied_bytes: u64,
    unwritten_bytes: u64,
    names: usize,
    /// See [`MOST_RETRIES`].
    retries: u32,
    /// The most that is copied, bytes.
    budget_bytes: u64,
    /// Until when the job may be frozen.
    deadline: Option<Instant>,
    /// Inodes of files whose leases an open for reading would break.
    leased: HashSet<u64>,
    /// Which file systems, by device number, are a tmpfs.
    tmpfs: HashMap<u64, bool>,
    /// What the job writes after the snapshot is recorded there.
    record: Option<&'a Record>,
}

/// A copy of a file.
struct FileCopy {
    /// What was copied.
    of: Identity,
    /// Its name among the staged files.
    name: String,
    /// What it takes of the budget: holes take next to nothing.
    taken_bytes: u64,
}

/// The content of one file for the store.
struct Content {
    data: RelPath,
    bytes: u64,
    from: From,
}

enum From {
    /// A copy.
    Staged(String),
    /// The file itself, which has not changed since these chunks were stored.
    Unchanged { path: PathBuf, identity: Identity, chunks: ChunkNames },
}

/// The files of one snapshot.
pub struct CapturedFiles {
    inventory: Inventory,
    contents: Vec<Content>,
}

impl OpenForWriting {
    /// Adds the files that processes have mapped shared and writable. `proc` is the job's /proc.
    pub fn add_mapped(&mut self, proc: &Path, pids: &[i32]) {
        for pid in pids {
            let Ok(maps) = read_maps(proc.join(pid.to_string()).join("maps")) else { continue };
            let is_written =
                |map: &&MemoryMap| map.perms.contains(MMPermissions::SHARED | MMPermissions::WRITE);
            for map in maps.0.iter().filter(is_written).filter(|map| map.inode != 0) {
                self.mapped_inodes.insert(map.inode);
                if let MMapPath::Path(path) = &map.pathname {
                    self.mapped.insert(path_text(path));
                }
            }
        }
    }
}

impl<'a> Capture<'a> {
    /// Begins to record the files of a job whose root directory is `root`. `held` is a directory beside the store that
    /// does not exist yet.
    pub fn new(
        rules: &'a FileRules,
        history: &'a mut FileHistory,
        root: PathBuf,
        cwd: &str,
        staged: &'a StagedDir,
        held: PathBuf,
    ) -> Self {
        let inventory = Inventory::new(history.begun_ns);
        let held_on = held.ancestors().find_map(FileSystem::of);
        Self {
            rules,
            history,
            root,
            cwd: cwd.to_owned(),
            staged,
            held,
            held_on,
            prepared: BTreeMap::new(),
            inventory,
            contents: Vec::new(),
            tmpfs: HashMap::new(),
            copied_bytes: 0,
            unwritten_bytes: 0,
            names: 0,
            retries: 0,
            budget_bytes: rules.budget_bytes,
            deadline: None,
            leased: HashSet::new(),
            record: None,
        }
    }

    /// What the job writes after this snapshot goes to `record`.
    #[must_use]
    pub fn recorded_by(mut self, record: Option<&'a Record>) -> Self {
        self.record = record;
        self
    }

    /// See [`Capture::recorded_by`].
    #[must_use]
    pub fn next_record(&self) -> Option<&'a Record> {
        self.record
    }

    /// Copies at most this much from now on, where memory is short.
    pub fn has_room(&mut self, room_bytes: u64) {
        self.budget_bytes = self.budget_bytes.min(self.copied_bytes.saturating_add(room_bytes));
    }

    /// Copies what has changed since the last snapshot, while the job runs. Errors only mean that more is copied later.
    ///
    /// A write through a mapping that was there before does not change a file's times. So files that are mapped now or
    /// afterwards are copied while the job is frozen only, and so are those on a tmpfs, see [`Self::may_hide_changes`].
    pub fn prepare(&mut self) {
        let found = self.find(&OpenForWriting::default());
        self.leased = leases::broken_by_reading(Path::new("/proc"));
        // Looked for once there is a file to copy.
        let mut mapped = None;
        let now_ns = nanoseconds(SystemTime::now());
        for (path, meta) in found {
            let now = Identity::of(&meta);
            let is_quiet = !now.may_change_unseen(now_ns);
            if !meta.is_file()
                || !is_quiet
                || self.leased.contains(&now.ino)
                || !self.is_kept(&path, &now)
                || self.unchanged(&path, &now).is_some()
                || mapped.get_or_insert_with(|| self.mapped_inodes()).contains(&now.ino)
            {
                continue;
            }
            if !self.has_budget(&path, &now) {
                self.hash(&path, &now);
            } else if !self.is_on_tmpfs(&path, now.dev)
                && let Ok(copy) = self.copy(&path)
                && copy.of == now
            {
                self.copied_bytes += copy.taken_bytes;
                self.prepared.insert(path, copy);
            }
        }
        if !self.prepared.is_empty() {
            let mapped = self.mapped_inodes();
            let copies = std::mem::take(&mut self.prepared).into_iter();
            let (useless, kept): (BTreeMap<_, _>, _) =
                copies.partition(|(_, copy)| mapped.contains(&copy.of.ino));
            self.prepared = kept;
            useless.values().for_each(|copy| self.discard(&copy.name));
        }
        let _ = faults::hit("files-prepared");
    }

    /// The inodes of files that processes of the job have mapped shared and writable.
    fn mapped_inodes(&self) -> HashSet<u64> {
        let proc = inside(&self.root, "/proc");
        let mut open = OpenForWriting::default();
        open.add_mapped(&proc, &numbers_in(&proc).unwrap_or_default());
        open.mapped_inodes
    }

    /// Adds what the job has written since this was called before, or since the last snapshot; `None` if that is not known.
    pub fn touch(&mut self, paths: Option<Vec<String>>) {
        for path in paths.iter().flatten() {
            if let Some(copy) = self.prepared.remove(path) {
                self.discard(&copy.name);
            }
        }
        self.history.touch(paths);
    }

    /// Whether the times of a file may hide a change since the last snapshot: a tmpfs may give a page to a process for reading
    /// and writing at once. If the job's writes are known, it shows when a file is closed after that.
    fn may_hide_changes(&mut self, path: &str, file: &State) -> bool {
        let may_be =
            file.is_open || self.history.touched.as_ref().is_none_or(|touched| touched.contains(path));
        may_be && self.is_on_tmpfs(path, file.now.dev)
    }

    /// Frees a copy that is not used.
    fn discard(&self, name: &str) {
        if let Err(error) = self.staged.remove(name) {
            tracing::debug!("cannot remove the copy of a file: {error}");
        }
    }

    fn is_on_tmpfs(&mut self, path: &str, dev: u64) -> bool {
        let kind = || kind_of(&inside(&self.root, text_path(path)));
        *self.tmpfs.entry(dev).or_insert_with(|| kind() == Some(libc::TMPFS_MAGIC))
    }

    /// Records all files while the job is frozen. It may be called again after a failed dump.
    ///
    /// # Errors
    /// When that takes until after the deadline.
    pub fn freeze(&mut self, open: &OpenForWriting, deadline: Instant) -> io::Result<CapturedFiles> {
        self.inventory = Inventory::new(self.history.begun_ns);
        self.deadline = Some(deadline);
        self.contents.clear();
        self.copied_bytes = self.prepared.values().map(|copy| copy.taken_bytes).sum();
        self.unwritten_bytes = 0;
        self.leased = leases::broken_by_reading(Path::new("/proc"));
        self.carry_over();
        for (path, meta) in self.find(open) {
            if Instant::now() > deadline {
                return Err(io::Error::new(ErrorKind::TimedOut, "there was no time to copy them"));
            }
            self.record(path, &meta, open);
        }
        let mut inventory = std::mem::take(&mut self.inventory);
        inventory.recorded_ns = nanoseconds(SystemTime::now());
        inventory.excluded.clone_from(&self.rules.patterns);
        self.history.report_uncovered(&inventory.uncovered);
        Ok(CapturedFiles { inventory, contents: std::mem::take(&mut self.contents) })
    }

    /// Records the files that have certainly not changed since the last snapshot. A file may also have been written under
    /// another name, so each is looked at.
    fn carry_over(&mut self) {
        let Some(touched) = &self.history.touched else { return };
        let known = self.history.known.iter().filter(|(path, known)| {
            // Of a directory that is renamed or deleted, only its own name is reported.
            let mut names = Path::new(path).ancestors().filter_map(Path::to_str);
            !names.any(|name| touched.contains(name))
                && !known.entry.is_open
                && self.rules.covers(&text_path(path), true)
                && Identity::of_path(&self.full(path)).is_some_and(|now| self.is_unchanged(known, &now))
        });
        let known: Vec<_> = known.map(|(path, known)| (path.clone(), known.clone())).collect();
        for (path, known) in known {
            let (mut entry, identity) = (known.entry.clone(), known.entry.identity);
            if let Kind::File(copies) = &mut entry.kind {
                *copies = self.again(&path, &identity, copies, &known.chunks);
            }
            self.inventory.entries.insert(path, entry);
        }
    }

    /// The files to look at, with their metadata: those that were touched or are open, and those below the working
    /// directory if it is not known what was touched.
    fn find(&mut self, open: &OpenForWriting) -> BTreeMap<String, Metadata> {
        let mut found = BTreeMap::new();
        let mut paths: BTreeSet<String> = open.writable.clone();
        let is_tracked = self.history.touched.is_some();
        paths.extend(self.history.touched.iter().flatten().cloned());
        // A directory that the job removes with its open file is needed too.
        let parents = |paths: &BTreeSet<String>| -> BTreeSet<String> {
            paths.iter().filter_map(|path| Some(Path::new(path).parent()?.to_str()?.to_owned())).collect()
        };
        let needed: BTreeSet<String> = open.writable.iter().cloned().chain(parents(&open.writable)).collect();
        let parents = parents(&paths);
        paths.extend(parents);
        let known = self.history.known.keys().filter(|path| !self.inventory.entries.contains_key(*path));
        paths.extend(known.cloned());
        let is_on = self.is_on();
        if is_on && (!is_tracked || self.history.known.is_empty()) {
            self.walk(&mut found);
        }
        for path in paths {
            let is_needed = needed.contains(&path) && !self.inventory.entries.contains_key(&path);
            let is_covered = is_needed || is_on && self.rules.covers(&text_path(&path), is_tracked);
            if !is_covered || path.starts_with("/dev/") {
                continue;
            }
            match self.retried(&path, |capture| fs::symlink_metadata(capture.full(&path))) {
                Ok(meta) => {
                    if is_tracked && meta.is_dir() && self.is_new_directory(&path, &meta) {
                        self.walk_below(&text_path(&path), &mut found);
                    }
                    found.insert(path, meta);
                }
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    self.inventory.uncovered.insert(path, format!("it cannot be looked at: {error}"));
                }
            }
        }
        found.retain(|path, _| !open.criu_links.contains(path));
        found
    }

    /// Whether files are covered that are not open for writing.
    fn is_on(&self) -> bool {
        self.rules.is_on(self.history.is_tracked())
    }

    /// Whether a directory was made or renamed since the last snapshot: a rename reports none of the files in it.
    fn is_new_directory(&self, path: &str, meta: &Metadata) -> bool {
        let is_touched = self.history.touched.as_ref().is_some_and(|touched| touched.contains(path));
        let known = self.history.known.get(path);
        is_touched && !known.is_some_and(|known| known.entry.identity.is_same_inode(&Identity::of(meta)))
    }

    /// Adds everything below the working directory on the same file system.
    fn walk(&mut self, found: &mut BTreeMap<String, Metadata>) {
        let cwd = self.cwd.clone();
        let is_all = self.walk_below(&text_path(&cwd), found);
        if is_all && self.history.touched.is_none() {
            self.inventory.complete.push(cwd);
        }
    }

    /// Adds everything below a directory. Returns whether that is all.
    fn walk_below(&mut self, dir: &Path, found: &mut BTreeMap<String, Metadata>) -> bool {
        let is_seen = self.history.touched.is_some();
        let mounts = MountPoints::read(&inside(&self.root, "/proc/1/mountinfo"));
        let covered = mounts.walk(&self.root, dir, usize::MAX, |path| self.rules.covers(path, is_seen));
        let mut seen = 0;
        for entry in covered.take(WALK_MAX + 1) {
            seen += 1;
            // One that fails was removed meanwhile, or may not be read.
            if let Ok((path, meta)) = entry {
                found.insert(path_text(path), meta);
            }
        }
        let is_all = seen <= WALK_MAX;
        if !is_all {
            let reason =
                format!("it has more than {WALK_MAX} files, so that only some of them were looked at");
            self.inventory.uncovered.insert(path_text(dir), reason);
        }
        is_all
    }

    /// Adds one file to the inventory.
    fn record(&mut self, path: String, meta: &Metadata, open: &OpenForWriting) {
        let full = self.full(&path);
        let mut entry = match Entry::of(&full, meta) {
            Ok(Some(entry)) => entry,
            Ok(None) => return,
            Err(error) => return drop(self.inventory.uncovered.insert(path, error.to_string())),
        };
        entry.is_open = open.writable.contains(&path);
        entry.is_mapped = open.mapped.contains(&path) || open.mapped_inodes.contains(&meta.ino());
        entry.written = entry.is_open
            || self.is_known_written(&path, &entry.identity)
            || self.rules.assumes_changes() && self.may_be_written(&path, &entry.identity);
        if let Kind::File(copies) = &mut entry.kind {
            let is_append_only = open.append_only.contains(&path) && !entry.is_mapped;
            let state = State {
                now: entry.identity,
                is_open: entry.is_open,
                is_mapped: entry.is_mapped,
                is_append_only,
            };
            match self.retried(&path, |capture| capture.copies(&path, &state, entry.written)) {
                Ok(kept) => *copies = kept,
                Err(error) => {
                    let reason = format!("its content could not be kept: {error}");
                    self.inventory.uncovered.insert(path.clone(), reason);
                }
            }
        }
        self.inventory.entries.insert(path, entry);
    }

    /// Does it again after an error of the system, see [`MOST_RETRIES`].
    fn retried<T>(&mut self, path: &str, work: impl Fn(&mut Self) -> io::Result<T>) -> io::Result<T> {
        loop {
            match work(self) {
                Err(error)
                    if error.raw_os_error().is_some() && !is_gone(&error) && self.retries < MOST_RETRIES =>
                {
                    tracing::debug!("{}: it is read again after an error: {error}", shown(path));
                    self.retries += 1;
                    std::thread::sleep(FILE_RETRY_INTERVAL);
                }
                other => return other,
            }
        }
    }

    /// Keeps the content of a file in the first way that is possible.
    fn copies(&mut self, path: &str, file: &State, is_written: bool) -> io::Result<Copies> {
        let is_as_it_shows = !file.is_mapped && !self.may_hide_changes(path, file);
        let unchanged = self.unchanged(path, &file.now).filter(|_| is_as_it_shows);
        if let Some((copies, chunks)) = unchanged {
            let again = self.again(path, &file.now, &copies, &chunks);
            if again != Copies::default() {
                return Ok(again);
            }
        }
        if self.leased.contains(&file.now.ino) {
            return Err(io::Error::other("a process holds a lease on it, which reading it would break"));
        }
        let is_small =
            file.now.bytes <= SMALL_BYTES && self.copied_bytes + file.now.bytes <= ALL_UNWRITTEN_MAX_BYTES;
        if !self.is_on() && !is_small {
            let prefix = Some(Prefix { blake3: None, is_whole: false });
            return Ok(Copies { prefix, ..Copies::default() });
        }
        if file.is_append_only && file.now.bytes > SMALL_BYTES {
            let mut content = open_file(&self.full(path))?;
            let prefix = Some(Prefix::of(&mut content, file.now.bytes, false)?);
            return Ok(Copies { prefix, ..Copies::default() });
        }
        let prepared = self.prepared.get(path).filter(|copy| copy.of == file.now && !file.is_mapped);
        if let Some(copy) = prepared {
            let name = copy.name.clone();
            return Ok(self.keep(file.now.bytes, From::Staged(name)));
        }
        if !self.is_kept(path, &file.now) {
            return Ok(Copies::default());
        }
        if self.has_budget(path, &file.now) {
            let copy = self.copy(path)?;
            self.copied_bytes += copy.taken_bytes;
            return Ok(self.keep(copy.of.bytes, From::Staged(copy.name)));
        }
        let copies = self.hold(path, file);
        let has_checksum_only = copies.data.is_none() && copies.held.is_none();
        if is_written && (copies == Copies::default() || has_checksum_only && self.is_overwritten(path, file))
        {
            let (bytes, most) = (file.now.bytes, self.budget_bytes);
            let reason = if most < self.rules.budget_bytes {
                format!("it has {}, and memory is free for copies of {}", size_text(bytes), size_text(most))
            } else {
                format!("it has {}, and --files-budget is {}", size_text(bytes), size_text(most))
            };
            self.inventory.uncovered.insert(path.to_owned(), reason);
        }
        Ok(copies)
    }

    /// Whether a file is known to change in place. A checksum is of no use for it.
    fn is_overwritten(&self, path: &str, file: &State) -> bool {
        let is_same_size_or_less = |known: &Known| {
            let then = &known.entry.identity;
            then.is_same_inode(&file.now)
                && file.now.bytes <= then.bytes
                && file.now.modified_ns != then.modified_ns
        };
        file.is_mapped || self.history.known.get(path).is_some_and(is_same_size_or_less)
    }

    /// Keeps the content of a file that is too large to be copied.
    fn hold(&mut self, path: &str, file: &State) -> Copies {
        let name = self.next_name();
        let target = self.held.join(&name);
        // Links need the launcher's own view of the file system.
        let from = text_path(path);
        let is_visible = Identity::of_path(&from).is_some_and(|seen| seen.is_same_inode(&file.now));
        // The job is frozen, and a store on another file system may not answer.
        let may_link = |held: FileSystem| held.may_have(&from, file.now.dev);
        let is_possible = is_visible && self.held_on.is_some_and(may_link);
        let is_made = is_possible && make_private_dir(&self.held).is_ok();
        if is_made && reflink(&from, &target).is_ok() {
            let identity = Identity::of_path(&target);
            return Copies { held: Some(Held { name, is_reflink: true, identity }), ..Copies::default() };
        }
        let prefix = self.hash(path, &file.now);
        let is_linked = !file.is_open && is_made && fs::hard_link(&from, &target).is_ok();
        let held = is_linked.then_some(Held { name, is_reflink: false, identity: None });
        Copies { held, prefix, ..Copies::default() }
    }

    /// Keeps a file as the last snapshot has it.
    fn again(&mut self, path: &str, now: &Identity, copies: &Copies, chunks: &ChunkNames) -> Copies {
        if copies.data.is_some() {
            let path = self.full(path);
            let chunks = ChunkNames::clone(chunks);
            return self.keep(now.bytes, From::Unchanged { path, identity: *now, chunks });
        }
        if copies.held.is_some() {
            let state = State { now: *now, is_open: false, is_mapped: false, is_append_only: false };
            return self.hold(path, &state);
        }
        copies.clone()
    }

    /// What the last snapshot has of a file that has not changed since.
    fn unchanged(&self, path: &str, now: &Identity) -> Option<(Copies, ChunkNames)> {
        let known = self.history.known.get(path)?;
        let copies = known.entry.copies()?;
        self.is_unchanged(known, now).then(|| (copies.clone(), ChunkNames::clone(&known.chunks)))
    }

    /// Whether a file is as in the last snapshot, as far as the file system's times show it.
    fn is_unchanged(&self, known: &Known, now: &Identity) -> bool {
        let then = &known.entry.identity;
        // A hard link of ours, made or removed, is a change of the inode.
        let is_held = || {
            let has_copy = known.entry.copies().is_some_and(|copies| copies.held.is_some());
            has_copy && then.is_same_inode(now) && then.has_same_content(now)
        };
        !known.entry.is_mapped
            && !then.may_change_unseen(self.history.recorded_ns)
            && (then.is_unchanged(now) || is_held())
    }

    /// Whether the job is known to have written a file.
    fn is_known_written(&self, path: &str, now: &Identity) -> bool {
        let before = self.history.known.get(path).is_some_and(|known| known.entry.written);
        let since_ns = self.history.begun_ns.max(self.history.recorded_ns);
        // A file in a directory that was renamed was written under another name.
        let mut dirs = Path::new(path).ancestors().skip(1).filter_map(Path::to_str);
        before
            || self.history.touched.as_ref().is_some_and(|touched| {
                touched.contains(path)
                    || may_be_since(now.changed_ns, since_ns) && dirs.any(|dir| touched.contains(dir))
            })
    }

    /// Whether the job has written a file, or may have.
    fn may_be_written(&self, path: &str, now: &Identity) -> bool {
        self.is_known_written(path, now)
            || self.history.touched.is_none() && may_be_since(now.changed_ns, self.history.begun_ns)
    }

    /// Whether a copy of a file is wanted: the job has written it, or it is small and may be written.
    fn is_kept(&mut self, path: &str, now: &Identity) -> bool {
        if self.may_be_written(path, now) {
            return true;
        }
        let fits =
            now.bytes <= UNWRITTEN_MAX_BYTES && self.unwritten_bytes + now.bytes <= ALL_UNWRITTEN_MAX_BYTES;
        self.unwritten_bytes += if fits { now.bytes } else { 0 };
        fits
    }

    fn keep(&mut self, bytes: u64, from: From) -> Copies {
        let data = RelPath::new(format!("files/{}", self.contents.len())).expect("a plain path");
        self.contents.push(Content { data: data.clone(), bytes, from });
        Copies { data: Some(data), ..Copies::default() }
    }

    /// Continues the checksum of a file that grows.
    fn hash(&mut self, path: &str, now: &Identity) -> Option<Prefix> {
        let mut file = open_file(&self.full(path)).ok()?;
        self.history.prefix(path, &mut file, now, HASH_MAX_BYTES).ok().flatten()
    }

    /// Whether a copy of a file is within the budget. Its holes take next to nothing.
    fn has_budget(&self, path: &str, now: &Identity) -> bool {
        let left_bytes = self.budget_bytes.saturating_sub(self.copied_bytes);
        let is_sparse = || has_at_most(left_bytes, &open_file(&self.full(path))?, now.bytes);
        now.bytes <= left_bytes || is_sparse().unwrap_or(false)
    }

    /// Copies a file.
    fn copy(&mut self, path: &str) -> io::Result<FileCopy> {
        faults::hit("file-copy")?;
        let mut from = open_file(&self.full(path))?;
        let name = self.next_name();
        for _ in 0..COPY_TRIES {
            let of = Identity::of(&from.metadata()?);
            let to = &mut self.staged.create(&name)?;
            let taken_bytes = copy_sparse(&mut from, to, of.bytes, self.deadline)?;
            if of == Identity::of(&from.metadata()?) {
                return Ok(FileCopy { of, name, taken_bytes });
            }
        }
        Err(io::Error::other("it changes while it is copied"))
    }

    /// Where a path of the job is for this process.
    fn full(&self, path: &str) -> PathBuf {
        inside(&self.root, text_path(path))
    }

    fn next_name(&mut self) -> String {
        self.names += 1;
        self.names.to_string()
    }
}

/// Whether a file was removed, or its directory.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// The state of a file at the snapshot.
struct State {
    now: Identity,
    is_open: bool,
    is_mapped: bool,
    is_append_only: bool,
}

impl CapturedFiles {
    /// All names, of a job with this working directory.
    pub fn take_inventory(&mut self, cwd: &str) -> Inventory {
        self.inventory.note_mount_points(cwd);
        std::mem::take(&mut self.inventory)
    }

    /// The contents for the store. `staged` has the copies.
    pub fn sources<'a>(&'a self, staged: &'a StagedDir) -> Vec<(&'a RelPath, Box<dyn Source + 'a>)> {
        let source = |content: &'a Content| -> Box<dyn Source + 'a> {
            match &content.from {
                From::Staged(name) => Box::new(StagedFile::new(staged, name.clone(), content.bytes)),
                From::Unchanged { path, identity, chunks } => {
                    Box::new(UnchangedFile { path, identity, chunks, bytes: content.bytes })
                }
            }
        };
        self.contents.iter().map(|content| (&content.data, source(content))).collect()
    }
}

/// A file of which the store has all chunks.
struct UnchangedFile<'a> {
    path: &'a Path,
    identity: &'a Identity,
    chunks: &'a ChunkNames,
    bytes: u64,
}

impl Source for UnchangedFile<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the file after all: the store to which the snapshot goes lacks the chunk.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let file = open_file(self.path)?;
        file.read_exact_at(into, offset)?;
        if self.identity.has_same_content(&Identity::of(&file.metadata()?)) {
            return Ok(());
        }
        Err(io::Error::other(format!("{} has changed while it was stored", self.path.display())))
    }

    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        let number = self.chunks.partition_point(|(end, _)| *end <= range.start);
        let (end, id) = self.chunks.get(number)?;
        let start = number.checked_sub(1).map_or(0, |previous| self.chunks[previous].0);
        ((start..*end) == range).then_some(*id)
    }
}

/// Whether links between two paths are possible depends on it.
#[derive(Clone, Copy)]
struct FileSystem {
    dev: u64,
    kind: FsWord,
}

impl FileSystem {
    /// `None` if there is no such path.
    fn of(path: &Path) -> Option<Self> {
        Some(Self { dev: fs::symlink_metadata(path).ok()?.dev(), kind: kind_of(path)? })
    }

    /// Whether the file at `path`, with the device number `dev`, may be on it. In some file systems, subvolumes and layers
    /// have device numbers of their own. No server is asked: these are local.
    fn may_have(self, path: &Path, dev: u64) -> bool {
        let has_parts = [libc::BTRFS_SUPER_MAGIC, libc::OVERLAYFS_SUPER_MAGIC].contains(&self.kind);
        self.dev == dev || has_parts && kind_of(path) == Some(self.kind)
    }
}

fn kind_of(path: &Path) -> Option<FsWord> {
    rustix::fs::statfs(path).ok().map(|status| status.f_type)
}

fn make_private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn open_file(path: &Path) -> io::Result<File> {
    // A FIFO in the place of the file is not waited for.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Makes `to` share the content of `from` without copying it.
///
/// # Errors
/// When the file system cannot do that, or `to` is on another one.
pub fn reflink(from: &Path, to: &Path) -> io::Result<()> {
    let source = open_file(from)?;
    let target = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    rustix::fs::ioctl_ficlone(&target, &source).map_err(|error| {
        let _ = fs::remove_file(to);
        error.into()
    })
}
