//! What a resume has to do so that the job's files are as they were at the snapshot. Planning changes nothing.
//!
//! For each name in the inventory: the present file is compared with the recorded identity. A file that has changed is
//! got back in the first way that is possible: the same inode under another name, the copy in the snapshot, cutting what
//! was appended, the reflink or hard link beside the store. If none is, the resume is refused, or the file is left alone
//! (`--files lenient`).
//!
//! Names that are not in the inventory were made since. They are moved aside if the job made them.

use crate::files::inventory::{Copies, Entry, Identity, Inventory, Kind, may_be_since};
use crate::files::links;
use crate::files::rules::{Coverage, FileRules};
use crate::files::walk::MountPoints;
use crate::job::alive::LastAlive;
use crate::namespace::{numbers_in, stdio};
use crate::restore::put_back::{MOVING, NEW};
use crate::sys::path_text::{path_text, shown, text_path};
use anyhow::{Result, bail};
use ckpt_snapshot::{Manifest, OpenFile, RelPath};
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Names shown when a resume is refused.
const NAMED_MAX: usize = 5;
/// The most files that are looked at below a directory.
const WALK_MAX: usize = 200_000;

/// How one file is put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileAction {
    /// Only its mode, owner and times may be wrong.
    Attributes,
    /// Its content is in a data file of the snapshot.
    Replace {
        /// The data file.
        data: RelPath,
        /// The present path of its inode, if there is one. The inode stays the same then: programs such as SQLite refuse
        /// to work with another one.
        at: Option<PathBuf>,
    },
    /// The file is at `from`, and has the content and perhaps more.
    Cut {
        /// Its present path.
        from: PathBuf,
    },
    /// The file is at this path, unchanged.
    Move(PathBuf),
    /// A hard link to this file.
    Link(PathBuf),
    /// A reflink of this file.
    Reflink(PathBuf),
}

impl FileAction {
    /// The present path of the file that gets its name back.
    #[must_use]
    pub fn from(&self) -> Option<&Path> {
        match self {
            Self::Move(from) | Self::Cut { from } | Self::Replace { at: Some(from), .. } => Some(from),
            _ => None,
        }
    }
}

/// The plan of a resume.
#[derive(Debug, Default)]
pub struct FilePlan {
    /// Directories to create or correct, parents first.
    pub directories: BTreeMap<PathBuf, Entry>,
    /// Files by path.
    pub files: BTreeMap<PathBuf, (Entry, FileAction)>,
    /// Symbolic links to create, with their targets.
    pub symlinks: BTreeMap<PathBuf, PathBuf>,
    /// FIFOs to create.
    pub fifos: BTreeMap<PathBuf, Entry>,
    /// Further names of a file: name and first name.
    pub hard_links: BTreeMap<PathBuf, PathBuf>,
    /// Files and directories that are moved aside first.
    pub aside: BTreeSet<PathBuf>,
    /// New names of files that have a name of the inventory too: removed, which loses nothing.
    pub extra_links: BTreeSet<PathBuf>,
    /// Files that are in the way and of no use: left over from an interrupted resume.
    pub leftovers: BTreeSet<PathBuf>,
    /// Files that have changed, it is not known whether by the job. They stay as they are.
    pub left_alone: Vec<String>,
    /// Files that are gone, it is not known whether by the job. They come back.
    pub come_back: Vec<String>,
}

/// Where the plan's knowledge of the present comes from.
pub struct Present<'a> {
    /// Which files are covered.
    pub rules: &'a FileRules,
    /// Paths that the job has touched since the snapshot, if that is known.
    pub touched: Option<&'a BTreeSet<String>>,
    /// The job's working directory.
    pub cwd: &'a str,
    /// Paths that other jobs of the store have written.
    pub others: &'a BTreeSet<String>,
    /// Files that the output of ckpt-run went to.
    pub outputs: &'a BTreeSet<&'a str>,
    /// Until when the job may have changed files.
    pub alive: &'a LastAlive,
    /// The directory of reflinks and hard links of the snapshot.
    pub held: &'a Path,
}

/// The inventory of a snapshot that was taken before snapshots had one: the lengths of the files that were open.
#[must_use]
pub fn inventory_of_open_files(manifest: &Manifest) -> Inventory {
    let mut inventory = Inventory::default();
    for file in &manifest.open_files {
        let spare = manifest.spare_files.iter().find(|spare| spare.path == file.path);
        let mut entry = open_entry(file);
        if let (Some(spare), Kind::File(copies)) = (spare, &mut entry.kind) {
            (entry.mode, entry.uid, entry.gid) = (spare.mode, spare.uid, spare.gid);
            copies.data = Some(spare.data.clone());
        }
        inventory.entries.insert(file.path.clone(), entry);
    }
    inventory
}

/// The entry of a file of which only the length is known.
fn open_entry(file: &OpenFile) -> Entry {
    let prefix = Some(crate::files::inventory::Prefix { blake3: None, is_whole: false });
    let meta = fs::symlink_metadata(text_path(&file.path)).ok();
    let attribute = |of: fn(&Metadata) -> u32, default| meta.as_ref().map_or(default, of);
    Entry {
        identity: Identity { bytes: file.size_bytes, ..Identity::default() },
        mode: attribute(|meta| meta.mode() & 0o7777, 0o600),
        uid: attribute(MetadataExt::uid, 0),
        gid: attribute(MetadataExt::gid, 0),
        written: true,
        is_open: true,
        is_mapped: false,
        kind: Kind::File(Copies { prefix, ..Copies::default() }),
    }
}

impl FilePlan {
    /// Plans the way back to an inventory. `appended` are the files that ckpt-run's own output is appended to: they are
    /// cut if the output went to the same files at the snapshot.
    ///
    /// # Errors
    /// When a file cannot be put back; all such files are named.
    pub fn make(
        manifest: &Manifest,
        inventory: &Inventory,
        present: &Present,
        appended: &[OpenFile],
    ) -> Result<Self> {
        let mut planner = Planner::new(inventory, present);
        planner.new_names();
        let mut leaders: HashMap<(u64, u64), PathBuf> = HashMap::new();
        for (path, entry) in &inventory.entries {
            let path = text_path(path).into_owned();
            let identity = &entry.identity;
            if matches!(entry.kind, Kind::File(_)) && identity.links > 1 && identity.ino != 0 {
                match leaders.get(&(identity.dev, identity.ino)) {
                    Some(leader) => {
                        planner.hard_link(path, entry, leader.clone());
                        continue;
                    }
                    None => drop(leaders.insert((identity.dev, identity.ino), path.clone())),
                }
            }
            planner.entry(path, entry);
        }
        planner.unknown_files();
        for stream in manifest.stdio.iter().filter_map(|stream| stream.file.as_ref()) {
            let grown =
                appended.iter().any(|now| now.path == stream.path && now.size_bytes > stream.size_bytes);
            let path = text_path(&stream.path).into_owned();
            if grown && !planner.plan.files.contains_key(&path) {
                let cut = FileAction::Cut { from: path.clone() };
                planner.plan.files.insert(path, (open_entry(stream), cut));
            }
        }
        planner.finish(&manifest.id.to_string())
    }

    /// Whether nothing has to be done.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.directories.is_empty()
            && self.files.is_empty()
            && self.symlinks.is_empty()
            && self.fifos.is_empty()
            && self.extra_links.is_empty()
            && self.hard_links.is_empty()
            && self.aside.is_empty()
            && self.leftovers.is_empty()
    }

    /// The data files of the snapshot that are needed.
    #[must_use]
    pub fn wanted(&self) -> Vec<&RelPath> {
        let actions = self.files.values().map(|(_, action)| action);
        let data = actions.filter_map(|action| match action {
            FileAction::Replace { data, .. } => Some(data),
            _ => None,
        });
        data.collect()
    }

    /// The paths that the plan changes.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        let files = self.files.keys().chain(self.directories.keys()).chain(self.symlinks.keys());
        files
            .chain(self.hard_links.keys())
            .chain(self.fifos.keys())
            .chain(&self.extra_links)
            .chain(&self.aside)
            .chain(&self.leftovers)
    }
}

struct Planner<'a> {
    inventory: &'a Inventory,
    present: &'a Present<'a>,
    plan: FilePlan,
    /// Present files that the inventory may have under another name.
    by_inode: HashMap<u64, (PathBuf, Identity)>,
    /// The inodes in the inventory, with their time of birth.
    known_inodes: HashSet<(u64, Option<i64>)>,
    /// Inodes with several names, of which the job has touched one.
    touched_inodes: HashSet<u64>,
    mounts: MountPoints,
    /// See [`files_open_for_writing`]; looked for once they are needed.
    open_now: OnceCell<HashSet<(u64, u64)>>,
    /// Older files that the inventory lacks.
    unknown: Vec<(String, Identity)>,
    refused: Vec<String>,
    /// Whether `--files lenient` would leave all of these as they are.
    can_stay: bool,
    is_same_boot: bool,
}

impl<'a> Planner<'a> {
    fn new(inventory: &'a Inventory, present: &'a Present<'a>) -> Self {
        let is_same_boot = present.alive.is_same_boot;
        let (plan, by_inode) = (FilePlan::default(), HashMap::new());
        let identities = inventory.entries.values().map(|entry| &entry.identity);
        let known_inodes = identities.map(|identity| (identity.ino, identity.born_ns)).collect();
        let touched = present
            .touched
            .into_iter()
            .flatten()
            .filter_map(|path| fs::symlink_metadata(text_path(path)).ok());
        let touched_inodes =
            touched.filter(|meta| meta.is_file() && meta.nlink() > 1).map(|meta| meta.ino()).collect();
        let (unknown, refused) = (Vec::new(), Vec::new());
        let mounts = MountPoints::read(Path::new("/proc/self/mountinfo"));
        Self {
            inventory,
            present,
            plan,
            by_inode,
            known_inodes,
            touched_inodes,
            mounts,
            open_now: OnceCell::new(),
            unknown,
            refused,
            can_stay: true,
            is_same_boot,
        }
    }

    /// Whether the job, as far as it is known, has made the change that the file system recorded at this time.
    fn is_by_job(&self, path: &str, changed_ns: i64) -> bool {
        self.present.touched.is_some_and(|touched| self.is_recorded(touched, path, changed_ns))
            || self.present.alive.interrupted.contains(path)
            || !self.is_unattributed() && self.may_be_unrecorded(path, changed_ns)
    }

    /// Whether the job may have made this change without a record: what was written in the last moments may not be recorded.
    /// Outside of the job's directory that is not assumed: others write there too.
    fn may_be_unrecorded(&self, path: &str, changed_ns: i64) -> bool {
        let alive = self.present.alive;
        let since_ns = if self.present.touched.is_some() { alive.known_until_ns } else { 0 };
        changed_ns >= since_ns
            && changed_ns <= alive.until_ns
            && Path::new(path).starts_with(self.present.cwd)
            && !self.present.others.contains(path)
    }

    /// Whether changes are nobody's: it is not known what the job has written, and that is not guessed.
    fn is_unattributed(&self) -> bool {
        self.present.touched.is_none() && !self.present.rules.assumes_changes()
    }

    /// Whether it is not known who made a change.
    fn is_doubtful(&self, path: &str, changed_ns: i64) -> bool {
        let is_auto = self.present.rules.coverage == Coverage::Auto;
        let is_told = self.present.touched.is_some() || is_auto && self.is_unattributed();
        let is_changed = may_be_since(changed_ns, self.inventory.recorded_ns);
        is_told && is_changed && self.may_be_unrecorded(path, changed_ns)
    }

    /// Whether a change is among those that were reported, or made by an interrupted resume.
    fn is_recorded(&self, touched: &BTreeSet<String>, path: &str, changed_ns: i64) -> bool {
        // Of a directory that is renamed, only its own name is reported: its files were written under other names.
        let mut dirs = Path::new(path).ancestors().skip(1).filter_map(Path::to_str);
        let alive = self.present.alive;
        let is_now = may_be_since(changed_ns, self.inventory.recorded_ns) && changed_ns <= alive.until_ns;
        touched.contains(path)
            || alive.interrupted.contains(path)
            || is_now && dirs.any(|dir| touched.contains(dir))
    }

    /// Whether the directory of a file is still the one that it was.
    fn is_in_same_directory(&self, path: &Path) -> bool {
        let Some(dir) = path.parent() else { return true };
        let then = self.inventory.entries.get(&path_text(dir));
        let now = Identity::of_path(dir);
        now.is_some_and(|now| then.is_none_or(|then| then.identity.is_same_inode(&now)))
    }

    /// Whether the job has changed or deleted a file of the inventory that it had not written before the snapshot.
    fn is_changed_by_job(&self, path: &Path, now: Option<&Metadata>) -> bool {
        let names = || path.ancestors().map(path_text);
        // Of a directory that is renamed or deleted, only its own name is reported.
        if now.is_none()
            && self.present.touched.is_some_and(|touched| names().any(|name| touched.contains(&name)))
        {
            return true;
        }
        if now.is_some_and(|now| self.touched_inodes.contains(&now.ino())) {
            return true;
        }
        let changed = changed_ns(path, now);
        let (name, is_kept) = (path_text(path), self.is_in_same_directory(path));
        match self.present.touched {
            // More likely than the job's first change of a file, just before it was killed, is a person's just after.
            Some(touched) if is_kept => self.is_recorded(touched, &name, changed),
            _ => self.is_by_job(&name, changed),
        }
    }

    /// Finds names that are not in the inventory: those that the job has made are moved aside.
    fn new_names(&mut self) {
        // A snapshot of an older ckpt-run lists open files only.
        if self.inventory.recorded_ns == 0 {
            return;
        }
        let mut found: BTreeMap<String, Metadata> = BTreeMap::new();
        let mut listed: BTreeSet<PathBuf> = BTreeSet::new();
        let roots = self.inventory.complete.iter().map(String::as_str);
        // What the job has written is not known, not even in the last moments.
        let is_recorded = self.present.alive.known_until_ns >= self.present.alive.until_ns;
        let cwd = (self.present.touched.is_none() || !is_recorded).then_some(self.present.cwd);
        // Of a directory that was renamed, only its own name is known.
        let touched = self.present.touched.into_iter().flatten().chain(&self.present.alive.interrupted);
        let moved = touched.map(String::as_str).filter(|path| self.is_moved_directory(path));
        for root in roots.chain(cwd).chain(moved).collect::<BTreeSet<_>>() {
            self.walk(&text_path(root), usize::MAX, &mut found);
        }
        let files = self.inventory.entries.iter().filter(|(_, entry)| entry.copies().is_some());
        let paths = files.map(|(path, _)| path).chain(self.present.touched.into_iter().flatten());
        let paths = paths.chain(&self.present.alive.interrupted);
        for path in paths {
            let path = text_path(path);
            let Some(dir) = path.parent() else { continue };
            if !self.inventory.is_complete_at(dir) && listed.insert(dir.to_owned()) {
                self.walk(dir, 1, &mut found);
            }
        }
        for (path, meta) in &found {
            if meta.is_file() {
                self.by_inode.insert(meta.ino(), (text_path(path).into_owned(), Identity::of(meta)));
            }
        }
        for (path, meta) in &found {
            let full = text_path(path).into_owned();
            let name = full.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(NEW) {
                self.plan.leftovers.insert(full);
                continue;
            }
            if self.present.outputs.contains(path.as_str()) {
                continue;
            }
            let is_ours = name.starts_with(MOVING) || self.is_left_link(&name, meta, &found);
            let is_known = self.inventory.entries.contains_key(path) || self.plan.has_aside_above(&full);
            let is_made_since = self.is_made_since(path, meta) || is_ours;
            if is_known || self.is_ancestor_of_known(path) {
                continue;
            }
            if self.is_of_somebody_else(path, &Identity::of(meta)) {
                continue;
            }
            if is_made_since && self.has_known_name(meta) {
                self.plan.extra_links.insert(full);
            } else if is_made_since {
                self.plan.aside.insert(full);
            } else if meta.is_file() {
                self.unknown.push((path.clone(), Identity::of(meta)));
            }
        }
    }

    /// Whether this is a directory that the inventory has under another name.
    fn is_moved_directory(&self, path: &str) -> bool {
        !self.inventory.entries.contains_key(path)
            && fs::symlink_metadata(text_path(path))
                .is_ok_and(|meta| meta.is_dir() && self.is_known_inode(&Identity::of(&meta)))
    }

    /// Whether a file with several names still has one that the inventory knows.
    fn has_known_name(&self, meta: &Metadata) -> bool {
        let identity = Identity::of(meta);
        let mut names =
            self.inventory.entries.iter().filter(|(_, entry)| entry.identity.is_same_inode(&identity));
        meta.is_file()
            && identity.links > 1
            && names.any(|(name, _)| {
                Identity::of_path(&text_path(name)).is_some_and(|now| now.ino == identity.ino)
            })
    }

    /// Whether this is a link to a file of the job that a killed dump has left. `found` are the names beside it.
    fn is_left_link(&self, name: &str, meta: &Metadata, found: &BTreeMap<String, Metadata>) -> bool {
        let identity = Identity::of(meta);
        let is_same = |other: &Metadata| (other.dev(), other.ino()) == (meta.dev(), meta.ino());
        let is_by_job =
            || found.iter().any(|(path, other)| is_same(other) && self.is_by_job(path, identity.changed_ns));
        links::is_criu_link(name)
            && meta.is_file()
            && (self.is_known_inode(&identity) || self.is_born_since(&identity) && is_by_job())
            && !self.open_now.get_or_init(files_open_for_writing).contains(&(identity.dev, identity.ino))
    }

    fn is_known_inode(&self, identity: &Identity) -> bool {
        self.known_inodes.contains(&(identity.ino, identity.born_ns))
    }

    fn is_born_since(&self, identity: &Identity) -> bool {
        may_be_since(identity.born_ns.unwrap_or(identity.changed_ns), self.inventory.recorded_ns)
    }

    /// Whether a name that the inventory lacks was made by the job after the snapshot.
    fn is_made_since(&self, path: &str, meta: &Metadata) -> bool {
        let identity = Identity::of(meta);
        let is_complete = self.inventory.is_complete_at(&text_path(path));
        let is_born_since = self.is_born_since(&identity);
        let is_renamed = || self.is_known_inode(&identity);
        (is_complete || is_born_since || is_renamed()) && self.is_by_job(path, identity.changed_ns)
    }

    /// Whether a file that seems to be the job's is open for writing: the job has no process any more. It is somebody else's,
    /// such as the log of `ckpt-run … | tee LOG`, unless it is recorded that the job, or a resume, has written it.
    fn is_of_somebody_else(&self, path: &str, identity: &Identity) -> bool {
        let alive = self.present.alive;
        let is_on_record = self.present.touched.is_some_and(|touched| touched.contains(path))
            || alive.interrupted.contains(path);
        !is_on_record && self.is_by_job(path, identity.changed_ns) && {
            let open = self.open_now.get_or_init(files_open_for_writing);
            open.contains(&(identity.dev, identity.ino))
        }
    }

    fn is_ancestor_of_known(&self, path: &str) -> bool {
        let below = format!("{}/", path.trim_end_matches('/'));
        self.inventory
            .entries
            .range(below.clone()..)
            .next()
            .is_some_and(|(known, _)| known.starts_with(&below))
    }

    fn walk(&self, top: &Path, depth: usize, found: &mut BTreeMap<String, Metadata>) {
        let is_seen = self.present.touched.is_some();
        let covered =
            self.mounts.walk(Path::new("/"), top, depth, |path| self.present.rules.covers(path, is_seen));
        for (path, meta) in covered.take(WALK_MAX).flatten() {
            found.insert(path_text(path), meta);
        }
    }

    /// Plans one name.
    fn entry(&mut self, path: PathBuf, entry: &Entry) {
        let now = fs::symlink_metadata(&path).ok();
        let is_required = entry.written || entry.is_open;
        let is_by_job = is_required || self.is_changed_by_job(&path, now.as_ref());
        if !is_by_job {
            let name = path_text(&path);
            if now.as_ref().is_some_and(Metadata::is_dir)
                || !self.is_doubtful(&name, changed_ns(&path, now.as_ref()))
            {
                return;
            }
            // Nothing is lost if a file comes back that a person has deleted. One that a person has moved stays there.
            if now.is_some() || self.is_unattributed() || self.is_moved_before(entry) {
                self.plan.left_alone.push(name);
                return;
            }
            self.plan.come_back.push(name);
        }
        let is_other_kind = now.as_ref().is_some_and(|now| match &entry.kind {
            Kind::File(_) => !now.is_file(),
            Kind::Directory => !now.is_dir(),
            Kind::Symlink(_) => !now.is_symlink(),
            Kind::Fifo => !now.file_type().is_fifo(),
        });
        if is_other_kind {
            self.plan.aside.insert(path.clone());
        }
        let now = now.filter(|_| !is_other_kind);
        match &entry.kind {
            Kind::File(copies) => self.file(path, entry, copies, now.as_ref(), is_by_job),
            Kind::Directory => {
                let is_right = |now: &Metadata| {
                    !is_required
                        || (now.mode() & 0o7777, now.uid(), now.gid()) == (entry.mode, entry.uid, entry.gid)
                };
                if !now.as_ref().is_some_and(is_right) {
                    self.plan.directories.insert(path, entry.clone());
                }
            }
            Kind::Fifo => {
                let is_right = |now: &Metadata| now.mode() & 0o7777 == entry.mode;
                if !now.as_ref().is_some_and(is_right) {
                    self.plan.fifos.insert(path, entry.clone());
                }
            }
            Kind::Symlink(target) => {
                let is_right = |_: &Metadata| fs::read_link(&path).is_ok_and(|now| now == *text_path(target));
                if !now.as_ref().is_some_and(is_right) {
                    self.plan.symlinks.insert(path, text_path(target).into_owned());
                }
            }
        }
    }

    /// Whether a file has another name now, which it has had before the last moments: a rename shows in the file's times.
    fn is_moved_before(&self, entry: &Entry) -> bool {
        let moved = self.by_inode.get(&entry.identity.ino);
        moved.is_some_and(|(at, now)| {
            now.is_same_inode(&entry.identity) && !self.may_be_unrecorded(&path_text(at), now.changed_ns)
        })
    }

    /// `is_by_job`: what cannot be put back is refused.
    fn file(
        &mut self,
        path: PathBuf,
        entry: &Entry,
        copies: &Copies,
        now: Option<&Metadata>,
        is_by_job: bool,
    ) {
        let then = &entry.identity;
        let present = now.map(Identity::of);
        // Nobody looked at it after the last tick of the file system's clock.
        let is_racy = copies.prove_content() && then.may_change_unseen(self.inventory.recorded_ns);
        let is_certain = !entry.is_mapped && !is_racy && self.is_same_boot;
        if is_certain && present.is_some_and(|now| then.is_unchanged(&now)) {
            return;
        }
        // The inode, wherever it is now.
        let here = present.filter(|now| now.is_same_inode(then)).map(|now| (path.clone(), now));
        let elsewhere = || self.by_inode.get(&then.ino).filter(|(_, now)| now.is_same_inode(then)).cloned();
        let inode = here.clone().or_else(elsewhere);
        let is_same_content = |now: &Identity| then.has_same_content(now) && !entry.is_mapped && !is_racy;
        let action = match (&inode, &copies.data) {
            (Some((at, now)), data) if is_same_content(now) && (self.is_same_boot || data.is_none()) => {
                Some(if *at == path { FileAction::Attributes } else { FileAction::Move(at.clone()) })
            }
            (_, Some(data)) => {
                // Without a time of birth, the inode may be another file's now.
                let at = inode.as_ref().filter(|(at, _)| then.born_ns.is_some() || *at == path);
                Some(FileAction::Replace { data: data.clone(), at: at.map(|(at, _)| at.clone()) })
            }
            _ => self.uncopied(&path, then, copies, inode.as_ref().map(|(at, _)| at), present.as_ref()),
        };
        let may_stay = !entry.is_open && self.present.rules.coverage == Coverage::Lenient;
        // Another file of the inventory may have taken its name.
        let other = present.filter(|now| !self.known_inodes.contains(&(now.ino, now.born_ns)));
        let candidates = [inode.clone(), other.map(|now| (path.clone(), now))].into_iter().flatten();
        let stays = { candidates }.find(|(_, now)| entry.is_open && now.bytes >= then.bytes);
        match action.or_else(|| self.as_it_is(stays.as_ref())) {
            Some(action) => {
                if let Some(from) = action.from() {
                    self.plan.aside.remove(from);
                    self.plan.extra_links.remove(from);
                }
                self.plan.files.insert(path, (entry.clone(), action));
            }
            None if !is_by_job => self.plan.left_alone.extend(self.plan.come_back.pop()),
            None if may_stay => {
                tracing::warn!(
                    "{}: the job has changed this file since the snapshot, and the snapshot does not have its content. It stays as it is (--files lenient)",
                    path.display()
                );
            }
            None => {
                self.can_stay &= !entry.is_open || stays.is_some();
                self.refuse(&path, then, present.as_ref());
            }
        }
    }

    /// How a file that the job had open, and whose content the snapshot does not have, is left as it is, if that is allowed.
    /// CRIU opens it only with the length that it had.
    fn as_it_is(&self, longer: Option<&(PathBuf, Identity)>) -> Option<FileAction> {
        let is_allowed = matches!(self.present.rules.coverage, Coverage::Lenient | Coverage::Off);
        let (from, _) = longer.filter(|_| is_allowed)?;
        tracing::warn!(
            "{}: the job has changed this file since the snapshot, and the snapshot does not have its content. Up to its length at the snapshot it stays as it is (--files lenient, or off)",
            from.display()
        );
        Some(FileAction::Cut { from: from.clone() })
    }

    /// How a file is put back of which the snapshot has no copy.
    fn uncopied(
        &self,
        path: &Path,
        then: &Identity,
        copies: &Copies,
        inode: Option<&PathBuf>,
        present: Option<&Identity>,
    ) -> Option<FileAction> {
        // The path identifies the file where nothing else does: a snapshot of an older ckpt-run, another machine; or where
        // the content does.
        let is_whole =
            copies.prefix.as_ref().is_some_and(|prefix| prefix.is_whole || prefix.blake3.is_none());
        let by_path = present.is_some() && (then.ino == 0 || is_whole || !self.is_same_boot);
        let at = inode.cloned().or_else(|| by_path.then(|| path.to_owned()));
        if let (Some(prefix), Some(at)) = (&copies.prefix, at)
            && let Ok(mut file) = File::open(&at)
            && file.metadata().is_ok_and(|meta| meta.is_file() && meta.len() >= then.bytes)
            && prefix.matches(&mut file, then.bytes).unwrap_or(false)
        {
            return Some(FileAction::Cut { from: at });
        }
        let held = copies.held.as_ref()?;
        let at = self.present.held.join(&held.name);
        let now = Identity::of_path(&at)?;
        match held.is_reflink {
            true => {
                let is_unchanged = held.identity.is_none_or(|made| made.is_unchanged(&now));
                (is_unchanged && now.bytes == then.bytes).then_some(FileAction::Reflink(at))
            }
            false => (now.is_same_inode(then) && now.has_same_content(then)).then_some(FileAction::Link(at)),
        }
    }

    fn refuse(&mut self, path: &Path, then: &Identity, present: Option<&Identity>) {
        let path = path.display();
        self.refused.push(match present {
            None => format!("{path} is missing now"),
            Some(now) if now.bytes < then.bytes => format!(
                "{path} has {} bytes, at the snapshot it had {}: it was truncated or replaced since",
                now.bytes, then.bytes
            ),
            Some(_) => format!("{path} was changed or replaced since the snapshot"),
        });
    }

    /// Another name of a file.
    fn hard_link(&mut self, path: PathBuf, entry: &Entry, leader: PathBuf) {
        let now = fs::symlink_metadata(&path).ok();
        let is_leader_untouched = !self.plan.files.contains_key(&leader);
        let is_same = |now: &Metadata| Identity::of(now).is_same_inode(&entry.identity);
        if is_leader_untouched && now.as_ref().is_some_and(is_same) {
            return;
        }
        if is_leader_untouched && fs::symlink_metadata(&leader).is_err() {
            // It stays away, and so do its other names.
            if self.plan.left_alone.iter().any(|left| *text_path(left) == leader) {
                self.plan.left_alone.push(path_text(path));
            }
            return;
        }
        let is_by_job = entry.written || entry.is_open || self.is_changed_by_job(&path, now.as_ref());
        if now.is_none() && !is_by_job {
            self.plan.come_back.push(path_text(&path));
        }
        self.plan.hard_links.insert(path, leader);
    }

    /// Refuses older files that the job has changed and that the snapshot does not have.
    fn unknown_files(&mut self) {
        for (path, identity) in std::mem::take(&mut self.unknown) {
            let full = &*text_path(&path);
            let is_changed = may_be_since(identity.changed_ns, self.inventory.recorded_ns);
            let is_by_job = match self.present.touched {
                Some(touched) => touched.contains(&path),
                None => self.is_by_job(&path, identity.changed_ns),
            };
            let is_by_job = is_by_job && is_changed;
            if !is_by_job {
                if self.is_doubtful(&path, identity.changed_ns) {
                    self.plan.left_alone.push(path);
                }
                continue;
            }
            if self.plan.has_source(full) || self.plan.has_aside_above(full) {
                continue;
            }
            if self.present.rules.coverage == Coverage::Lenient {
                tracing::warn!(
                    "{}: the job has changed this file since the snapshot, which does not have it. It stays as it is (--files lenient)",
                    full.display()
                );
            } else {
                self.refused.push(format!(
                    "{} was changed since the snapshot, which does not have its content",
                    full.display()
                ));
            }
        }
    }

    /// Adds the directories that what is put back needs and that are gone, or will be.
    fn missing_directories(&mut self) {
        let plan = &self.plan;
        let made = plan.files.keys().chain(plan.symlinks.keys()).chain(plan.fifos.keys());
        let above: BTreeSet<_> =
            made.chain(plan.hard_links.keys()).flat_map(|path| path.ancestors().skip(1)).collect();
        let entry = |path: &Path| self.inventory.entries.get(&path_text(path));
        let missing: Vec<_> = above
            .into_iter()
            .filter(|path| plan.has_aside_above(path) || !path.is_dir())
            .filter_map(|path| Some((path.to_owned(), entry(path)?.clone())))
            .filter(|(_, entry)| entry.kind == Kind::Directory)
            .collect();
        for (path, entry) in missing {
            self.plan.directories.entry(path).or_insert(entry);
        }
    }

    fn finish(mut self, id: &str) -> Result<FilePlan> {
        if !self.refused.is_empty() {
            let or = if self.can_stay { "; or leave the files as they are with --files lenient" } else { "" };
            bail!(
                "files of the job have changed since the snapshot {id} and cannot be put back: {}. No file was changed. Restore these files, or resume an older snapshot{or}",
                first_of(&self.refused)
            )
        }
        if !self.plan.left_alone.is_empty() {
            tracing::warn!(
                "files have changed since the snapshot, and it is not known whether by the job: {}. They stay as they are (`ckpt-run docs resuming`, \"Which files are the job's\")",
                first_of(&self.plan.left_alone)
            );
        }
        if !self.plan.come_back.is_empty() {
            tracing::warn!(
                "files are gone since the snapshot, and it is not known whether by the job: {}. They come back (`ckpt-run docs resuming`, \"Which files are the job's\")",
                first_of(&self.plan.come_back)
            );
        }
        self.missing_directories();
        Ok(self.plan)
    }
}

/// When a file was changed last, or its directory if it is gone. That may be gone as well.
fn changed_ns(path: &Path, now: Option<&Metadata>) -> i64 {
    let above = || path.ancestors().skip(1).find_map(|dir| fs::symlink_metadata(dir).ok());
    now.cloned().or_else(above).map_or(0, |meta| Identity::of(&meta).changed_ns)
}

/// The files, by device and inode, that some process has open for writing, as far as this one may know that.
fn files_open_for_writing() -> HashSet<(u64, u64)> {
    const WRITABLE: u32 = 0o200;
    let pids = numbers_in("/proc").unwrap_or_default().into_iter();
    let descriptors =
        pids.flat_map(|pid| fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten());
    // The link's mode is how the file was opened (proc_pid_fd(5)).
    let is_writable = |path: &PathBuf| {
        fs::symlink_metadata(path).is_ok_and(|link| link.permissions().mode() & WRITABLE != 0)
    };
    // No server is asked: one that does not answer would block the resume.
    let look = |path: PathBuf| statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS).ok();
    let files = descriptors.map(|entry| entry.path()).filter(is_writable).filter_map(look);
    files.map(|file| (makedev(file.stx_dev_major, file.stx_dev_minor), file.stx_ino)).collect()
}

/// The first of these names.
pub fn first_of(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let names: Vec<_> = names.iter().take(NAMED_MAX).map(|name| shown(name)).collect();
    format!("{}{more}", names.join("; "))
}

impl FilePlan {
    /// Leaves the files of the launcher's own output as they are: once they were cut, they grow by its messages alone.
    pub fn leave_own_output(&mut self) {
        self.files.retain(|path, (_, action)| {
            !matches!(action, FileAction::Cut { .. }) || stdio::own_output(path).is_none()
        });
    }

    /// Whether a path is moved aside, or below something that is.
    pub fn has_aside_above(&self, path: &Path) -> bool {
        path.ancestors().any(|above| self.aside.contains(above))
    }

    fn has_source(&self, path: &Path) -> bool {
        self.files.values().any(|(_, action)| action.from() == Some(path))
    }
}
