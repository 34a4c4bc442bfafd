//! Which files the job's processes have written, created, renamed or deleted: fanotify, read by the init.
//!
//! The init is in the job's PID namespace. The kernel reports the process of an event by its PID in the namespace of the
//! reader, and 0 for a process of another one (fanotify(7)): so the init knows which events are the job's, also those of
//! processes that have ended.
//!
//! Paths are appended to a file that the launcher hands over, one JSON string a line (see
//! [`crate::sys::path_text`]), each once. The launcher hands over another file at each snapshot. So the files say what was
//! written since a snapshot, also after everything was killed.
//!
//! An event costs the writer about a microsecond. So further changes of a file that is written again and again, such as a log, are
//! not reported any more ([`Quiet`]): its path is recorded.

#![allow(unsafe_code)]

use super::recorder::{Journal, Recorder};
use crate::sys::authentic::{FileKey, opened, sealed};
use crate::sys::mounts::{OWN, read_mounts};
use crate::sys::path_text::{path_text, text_path};
use ckpt_snapshot::open_regular;
use rustix::fs::{Mode, OFlags};
use rustix::io::retry_on_intr;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// While the job writes, events are collected in the kernel for this long, where equal ones are merged.
pub const DRAIN_INTERVAL: Duration = Duration::from_millis(20);

/// While the job writes nothing, the time of the record is renewed this often.
pub const STAMP_INTERVAL: Duration = Duration::from_millis(500);

/// What is recorded. FAN_MODIFY is also reported for truncate(2).
const MASK: u64 = libc::FAN_CREATE
    | libc::FAN_DELETE
    | libc::FAN_MOVED_FROM
    | libc::FAN_MOVED_TO
    | libc::FAN_MODIFY
    | libc::FAN_CLOSE_WRITE
    | libc::FAN_ATTRIB
    | libc::FAN_ONDIR;
/// At most so many files are quiet: the kernel keeps the inode of each in memory.
const QUIET_FILES: usize = 4096;
/// File systems of the kernel, on which a job stores nothing.
const NOT_WATCHED: &[&str] = &[
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "ramfs",
    "securityfs",
    "selinuxfs",
    "sysfs",
    "tracefs",
];
const METADATA_BYTES: usize = 24;
/// `FAN_EVENT_INFO_TYPE_DFID_NAME`: the handle of a directory, and a name in it.
const DIRECTORY_AND_NAME: u8 = 2;
/// The first line of a life of the job: a file may go on after an [`ENDED`].
const BEGUN: &str = "{\"begun\":true}";
/// The last line of a file when all processes of the job had ended.
const ENDED: &str = "{\"ended\":true}";
/// A line of a file that lacks paths.
pub const INCOMPLETE: &str = "{\"incomplete\":true}";

/// A longer line is no path (bytes).
const LINE_MAX_BYTES: u64 = 64 << 10;

/// The ID of a file system, as events have it.
type FileSystemId = [u8; 8];

/// The watched file systems, and the paths since the last snapshot.
pub(super) struct Tracker {
    events: File,
    /// The mount points of each file system.
    mounts: HashMap<FileSystemId, Vec<CString>>,
    /// Directories whose files are not reported.
    excluded: Vec<PathBuf>,
    paths: BTreeSet<String>,
    quiet: Quiet,
    is_incomplete: bool,
    recorder: Recorder,
    stamped: SystemTime,
}

/// Files whose changes are not reported, since their paths are among those since the last snapshot. Other events of them are.
/// They have one name each; when a program moves or deletes it, all changes are reported again.
#[derive(Default)]
struct Quiet {
    /// File system, directory and name of each.
    names: HashSet<Vec<u8>>,
    /// They cannot be reported again: no more are added.
    is_over: bool,
}

impl Quiet {
    /// Changes of the file at `path` are not reported from now on.
    fn add(&mut self, events: &File, path: &str, name: Vec<u8>) {
        if self.is_over || self.names.len() >= QUIET_FILES {
            return;
        }
        let path = text_path(path);
        let is_alone = |stat: rustix::fs::Stat| {
            rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_nlink == 1
        };
        if !rustix::fs::lstat(&*path).is_ok_and(is_alone) {
            return;
        }
        let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return };
        let flags = libc::FAN_MARK_ADD
            | libc::FAN_MARK_DONT_FOLLOW
            | libc::FAN_MARK_IGNORED_MASK
            | libc::FAN_MARK_IGNORED_SURV_MODIFY;
        let (fd, mask) = (events.as_raw_fd(), libc::FAN_MODIFY);
        // SAFETY: the path is a valid C string for the duration of the call.
        if unsafe { libc::fanotify_mark(fd, flags, mask, libc::AT_FDCWD, path.as_ptr()) } == 0 {
            self.names.insert(name);
        } else {
            tracing::debug!("changes of a file stay reported: {}", io::Error::last_os_error());
        }
    }

    /// Whether the event is of a name that is not what it was.
    fn is_renamed(&self, event: &Event<'_>) -> bool {
        let is_known = || event.named.is_some_and(|named| self.names.contains(&name_key(named)));
        let has = |mask| event.mask & mask != 0;
        let is_moved_directory = has(libc::FAN_MOVED_FROM) && has(libc::FAN_ONDIR);
        let is_gone = has(libc::FAN_MOVED_FROM) || has(libc::FAN_DELETE);
        !self.names.is_empty() && (is_moved_directory || is_gone && is_known())
    }

    /// All changes are reported again. Returns whether that is so.
    fn end(&mut self, events: &File) -> bool {
        if self.names.is_empty() {
            return true;
        }
        self.names.clear();
        // It flushes the marks of files and directories only.
        let flags = libc::FAN_MARK_FLUSH;
        // SAFETY: the path is not looked at.
        let flushed =
            unsafe { libc::fanotify_mark(events.as_raw_fd(), flags, 0, libc::AT_FDCWD, std::ptr::null()) };
        if flushed != 0 {
            tracing::warn!("changes of files are not reported: {}", io::Error::last_os_error());
            self.is_over = true;
        }
        flushed == 0
    }
}

fn name_key((id, handle, name): (FileSystemId, &[u8], &[u8])) -> Vec<u8> {
    [&id, handle, name].concat()
}

impl Tracker {
    /// Watches all file systems on which the job may write; `cwd` is its working directory. Also returns those that cannot
    /// be watched, with the reason.
    ///
    /// # Errors
    /// When the file system of `cwd` cannot be watched.
    pub(super) fn start(excluded: Vec<PathBuf>, cwd: &Path) -> io::Result<(Self, Vec<(String, String)>)> {
        let flags = libc::FAN_CLASS_NOTIF
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS
            | libc::FAN_REPORT_DIR_FID
            | libc::FAN_REPORT_NAME;
        // SAFETY: a plain system call on integers.
        let fd = unsafe { libc::fanotify_init(flags, libc::O_RDONLY.cast_unsigned()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        let events = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let (mut mounts, mut unwatched) = (HashMap::<_, Vec<_>>::new(), Vec::new());
        for mount in writable_mounts()? {
            match watch(&events, &mount) {
                Ok(id) => mounts.entry(id).or_default().push(mount),
                Err(error) => unwatched.push((mount.to_string_lossy().into_owned(), error.to_string())),
            }
        }
        let cwd = CString::new(cwd.as_os_str().as_bytes())?;
        if !mounts.contains_key(&file_system_id(&cwd)?) {
            let reasons: Vec<_> = unwatched.iter().map(|(mount, why)| format!("{mount}: {why}")).collect();
            return Err(io::Error::other(format!(
                "the file system of the job's directory cannot be watched ({})",
                reasons.join("; ")
            )));
        }
        hurry();
        let tracker = Self {
            events,
            mounts,
            excluded,
            paths: BTreeSet::new(),
            quiet: Quiet::default(),
            is_incomplete: false,
            recorder: Recorder::default(),
            stamped: SystemTime::UNIX_EPOCH,
        };
        Ok((tracker, unwatched))
    }

    /// Readable when there are events.
    pub(super) fn events(&self) -> &File {
        &self.events
    }

    /// Reads all events. Those of the processes `ignored` are dropped. Returns whether there were any.
    pub(super) fn drain(&mut self, ignored: &dyn Fn(i32) -> bool) -> bool {
        let begun = SystemTime::now();
        let mut buffer = vec![0; 1 << 16];
        let mut directories =
            Directories { mounts: &self.mounts, open: HashMap::new(), paths: HashMap::new() };
        // With the names of those that have changed.
        let mut found = BTreeMap::<String, Option<Vec<u8>>>::new();
        let (mut has_events, mut is_of_job) = (false, false);
        let (mut is_incomplete, mut is_renamed) = (false, false);
        loop {
            let read = match self.events.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    is_incomplete |= error.kind() != io::ErrorKind::WouldBlock;
                    break;
                }
            };
            has_events = true;
            let mut rest = &buffer[..read];
            while let Some(event) = Event::parse(&mut rest) {
                is_incomplete |= event.mask & libc::FAN_Q_OVERFLOW != 0;
                is_renamed |= self.quiet.is_renamed(&event);
                if event.pid <= 1 || ignored(event.pid) {
                    continue;
                }
                is_of_job = true;
                // If the directory is gone, its own parent reports that.
                let Some(named) = event.named else { continue };
                let Some(path) = directories.path(named) else { continue };
                let is_change = event.mask & libc::FAN_MODIFY != 0;
                let name = found.entry(path).or_default();
                *name = name.take().or_else(|| is_change.then(|| name_key(named)));
            }
        }
        is_incomplete |= is_renamed && !self.quiet.end(&self.events);
        let mut new = Vec::new();
        for (path, name) in found {
            match name.filter(|_| self.paths.contains(&path)) {
                Some(name) => self.quiet.add(&self.events, &path, name),
                None => new.extend(self.add(path)),
            }
        }
        self.record(&new, is_incomplete);
        // Not for other events: the stamp makes one.
        if is_of_job || begun.duration_since(self.stamped).is_ok_and(|age| age >= STAMP_INTERVAL) {
            self.recorder.stamp(begun);
            self.stamped = begun;
        }
        has_events
    }

    /// Records that no process of the job is left: without this line, the end is only known roughly.
    pub(super) fn record_end(&self) {
        self.recorder.append(vec![ENDED.to_owned()]);
        self.recorder.stamp(SystemTime::now());
    }

    /// Waits until everything is recorded, for `limit` at most.
    pub(super) fn flush(&self, limit: Duration) {
        self.recorder.flush(limit);
    }

    /// Adds a path. Returns it if it is new and not excluded.
    fn add(&mut self, path: String) -> Option<String> {
        let at = text_path(&path);
        let is_excluded = self.excluded.iter().any(|dir| at.starts_with(dir));
        (!is_excluded && self.paths.insert(path.clone())).then_some(path)
    }

    fn record(&mut self, new: &[String], is_incomplete: bool) {
        let mut lines: Vec<_> =
            new.iter().map(|path| serde_json::Value::from(path.as_str()).to_string()).collect();
        if is_incomplete {
            lines.push(INCOMPLETE.to_owned());
        }
        // A disk that is full: the launcher hears of it at the next snapshot.
        self.is_incomplete |= is_incomplete || self.recorder.take_failure();
        self.recorder.append(lines);
    }

    /// The paths since the last call with a journal, and whether that is all. Those that follow are appended to it.
    pub(super) fn next(&mut self, journal: Option<Journal>) -> (Vec<String>, bool) {
        let Some(journal) = journal else {
            return (self.paths.iter().cloned().collect(), !self.is_incomplete);
        };
        let is_first = self.recorder.switch(journal);
        if is_first {
            self.record(&self.paths.iter().cloned().collect::<Vec<_>>(), false);
        }
        let is_complete = !std::mem::take(&mut self.is_incomplete);
        // What is changed from here on is reported, and belongs to the next ones.
        if !self.quiet.end(&self.events) {
            self.record(&[], true);
        }
        (std::mem::take(&mut self.paths).into_iter().collect(), is_complete)
    }
}

/// Begins to record a life of the job in a file.
///
/// # Errors
/// When it cannot be written.
pub fn begin_journal(file: &mut File, key: &FileKey) -> io::Result<()> {
    writeln!(file, "{}", sealed(key, BEGUN))
}

/// How the kernel schedules a thread.
struct Scheduling {
    policy: libc::c_int,
    parameters: libc::sched_param,
    nice: libc::c_int,
}

/// As it was before [`hurry`].
static BEFORE: OnceLock<Scheduling> = OnceLock::new();

impl Scheduling {
    fn of_this_thread() -> Self {
        let mut parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameters outlive the call.
        unsafe { libc::sched_getparam(0, &raw mut parameters) };
        // SAFETY: it only answers.
        let policy = unsafe { libc::sched_getscheduler(0) };
        // SAFETY: as above.
        let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        Self { policy, parameters, nice }
    }
}

/// Gives this process, a child of one that called [`hurry`], back what it would have inherited: the kernel gives such a child
/// the normal policy and the nice value 0 (sched(7), SCHED_RESET_ON_FORK). Makes system calls only.
pub(super) fn stop_hurrying() {
    let Some(before) = BEFORE.get() else { return };
    // SAFETY: the parameters outlive the call. Without the right to it, the policy stays the normal one.
    unsafe { libc::sched_setscheduler(0, before.policy, &raw const before.parameters) };
    // SAFETY: it takes numbers only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, before.nice) };
}

/// Runs this thread before others, but not its children. On a busy machine, records would be late. And when a launcher is
/// killed, and this process right after it, the end of the job is recorded in between. Where that is not allowed, more
/// counts as unrecorded.
pub(super) fn hurry() {
    BEFORE.get_or_init(Scheduling::of_this_thread);
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameters outlive the call.
    let set = unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const lowest)
    };
    if set != 0 {
        tracing::debug!("cannot raise the priority of the init: {}", io::Error::last_os_error());
    }
}

/// Reads a file of paths. `None` if paths are missing in it, or if it was not begun with this key.
///
/// # Errors
/// When it cannot be read.
pub fn read_journal(path: &Path, key: &FileKey) -> io::Result<Option<BTreeSet<String>>> {
    let is = |line: &io::Result<Vec<u8>>, what: &str| {
        line.as_ref().is_ok_and(|line| opened(key, line) == Some(what.as_bytes()))
    };
    if key.is_some() && !lines(path)?.next().is_some_and(|first| is(&first, BEGUN)) {
        return Ok(None);
    }
    let is_incomplete = lines(path)?.any(|line| is(&line, INCOMPLETE));
    if is_incomplete { Ok(None) } else { read_paths(path, key).map(Some) }
}

/// The lines of a file.
///
/// # Errors
/// When it cannot be opened. An item is an error if it cannot be read, or is longer than a path can be.
fn lines(path: &Path) -> io::Result<impl Iterator<Item = io::Result<Vec<u8>>>> {
    let mut file = BufReader::new(open_regular(path, File::options().read(true))?);
    Ok(std::iter::from_fn(move || {
        let mut line = Vec::new();
        match file.by_ref().take(LINE_MAX_BYTES).read_until(b'\n', &mut line) {
            Ok(0) => return None,
            Err(error) => return Some(Err(error)),
            Ok(_) if line.ends_with(b"\n") => drop(line.pop()),
            Ok(read) if read as u64 == LINE_MAX_BYTES => {
                // Nothing after this is read.
                file = BufReader::new(File::open("/dev/null").ok()?);
                return Some(Err(io::ErrorKind::InvalidData.into()));
            }
            Ok(_) => {}
        }
        Some(Ok(line))
    }))
}

/// Reads the paths in a file, which may lack some. Those without the code of the key are left out.
///
/// # Errors
/// When it cannot be read.
pub fn read_paths(path: &Path, key: &FileKey) -> io::Result<BTreeSet<String>> {
    let lines = lines(path)?;
    // A line that is cut short was being written when the machine went down.
    let path = |line: Vec<u8>| serde_json::from_slice(opened(key, &line)?).ok();
    lines.filter_map(|line| line.map(path).transpose()).collect()
}

/// Whether the last line of a file says that all processes of the job had ended.
///
/// # Errors
/// When it cannot be read.
pub fn is_ended(path: &Path, key: &FileKey) -> io::Result<bool> {
    let file = open_regular(path, File::options().read(true))?;
    let last = sealed(key, ENDED) + "\n";
    let mut end = vec![0; last.len()];
    let Some(at) = file.metadata()?.len().checked_sub(last.len() as u64) else { return Ok(false) };
    file.read_exact_at(&mut end, at)?;
    Ok(end == last.as_bytes())
}

/// The mount points of writable file systems in this mount namespace.
fn writable_mounts() -> io::Result<Vec<CString>> {
    let mounts = read_mounts(OWN)?;
    let is_writable = |mount: &procfs_core::process::MountInfo| {
        !mount.mount_options.contains_key("ro")
            && !mount.super_options.contains_key("ro")
            && !NOT_WATCHED.contains(&mount.fs_type.as_str())
            // One that does not answer would block the init.
            && !mount.fs_type.starts_with("fuse")
    };
    let paths = mounts.iter().filter(|mount| is_writable(mount)).map(|mount| &mount.mount_point);
    Ok(paths.filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect())
}

/// Marks a file system. Returns its ID.
fn watch(events: &File, mount: &CString) -> io::Result<FileSystemId> {
    // Events have handles of directories. Not every file system can open these again: overlayfs cannot, unless it is
    // mounted with `nfs_export=on`.
    let mounted = open_mount(mount)?;
    open_handle(&mounted, &handle_of(&mounted)?)?;
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
    // SAFETY: the path is a valid C string for the duration of the call.
    let marked =
        unsafe { libc::fanotify_mark(events.as_raw_fd(), flags, MASK, libc::AT_FDCWD, mount.as_ptr()) };
    if marked != 0 {
        return Err(io::Error::last_os_error());
    }
    file_system_id(mount)
}

fn file_system_id(path: &CString) -> io::Result<FileSystemId> {
    // SAFETY: `statfs` is plain data for which all zeroes is a value.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a valid C string, and `stat` outlives the call.
    if unsafe { libc::statfs(path.as_ptr(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both are eight bytes of plain data.
    Ok(unsafe { std::mem::transmute::<libc::fsid_t, FileSystemId>(stat.f_fsid) })
}

/// Opens a mount point, which may be a file.
fn open_mount(mount: &CString) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(retry_on_intr(|| rustix::fs::open(mount, flags, Mode::empty()))?)
}

/// The bytes of the `struct file_handle` of an open file.
fn handle_of(file: &OwnedFd) -> io::Result<Vec<u8>> {
    const HEADER_BYTES: usize = 8;
    let mut handle = [0_u32; (HEADER_BYTES + libc::MAX_HANDLE_SZ as usize) / 4];
    handle[0] = libc::MAX_HANDLE_SZ as u32;
    let mut mount_id = 0;
    // SAFETY: the path is a C string; `handle` has room for a handle of the length that its header says.
    let found = unsafe {
        libc::name_to_handle_at(
            file.as_raw_fd(),
            c"".as_ptr(),
            handle.as_mut_ptr().cast(),
            &raw mut mount_id,
            libc::AT_EMPTY_PATH,
        )
    };
    if found != 0 {
        return Err(io::Error::last_os_error());
    }
    let bytes = handle.iter().flat_map(|word| word.to_ne_bytes());
    Ok(bytes.take(HEADER_BYTES + handle[0] as usize).collect())
}

/// Opens a file by the bytes of its `struct file_handle`. `mount` is an open file of its file system.
fn open_handle(mount: &OwnedFd, handle: &[u8]) -> io::Result<OwnedFd> {
    // Aligned as `struct file_handle` needs it.
    let mut aligned: Vec<u32> = Vec::with_capacity(handle.len() / 4 + 1);
    aligned.extend(handle.chunks(4).map(|part| {
        let mut word = [0; 4];
        word[..part.len()].copy_from_slice(part);
        u32::from_ne_bytes(word)
    }));
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: `aligned` holds a whole `struct file_handle` as the kernel wrote it, and outlives the call.
    let fd = unsafe { libc::open_by_handle_at(mount.as_raw_fd(), aligned.as_mut_ptr().cast(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// One event.
struct Event<'a> {
    /// What has happened, and whether to a directory.
    mask: u64,
    pid: i32,
    /// ID of the file system, handle of the directory, name.
    named: Option<(FileSystemId, &'a [u8], &'a [u8])>,
}

impl<'a> Event<'a> {
    /// Takes an event off the front (`struct fanotify_event_metadata`, followed by information records).
    fn parse(rest: &mut &'a [u8]) -> Option<Self> {
        let length = usize::try_from(u32_at(rest, 0)?).ok().filter(|&length| length >= METADATA_BYTES)?;
        let event = rest.get(..length)?;
        *rest = &rest[length..];
        let mask = u64::from(u32_at(event, 8)?) | u64::from(u32_at(event, 12)?) << 32;
        let pid = u32_at(event, 20)?.cast_signed();
        let mut records = &event[METADATA_BYTES..];
        let mut named = None;
        while let Some(&kind) = records.first() {
            let length = usize::from(u16::from_ne_bytes(records.get(2..4)?.try_into().ok()?));
            let record = records.get(..length).filter(|record| record.len() >= 20)?;
            records = &records[length..];
            if kind == DIRECTORY_AND_NAME {
                let id = record[4..12].try_into().ok()?;
                let handle_bytes = usize::try_from(u32_at(record, 12)?).ok()?;
                let (handle, name) = record[12..].split_at_checked(8 + handle_bytes)?;
                named = Some((id, handle, name.split(|&byte| byte == 0).next()?));
            }
        }
        Some(Self { mask, pid, named })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// From handles to paths. Directories can be renamed at any time: what was found is used for one drain only.
struct Directories<'a> {
    mounts: &'a HashMap<FileSystemId, Vec<CString>>,
    /// Open while events are read: an open directory keeps people from unmounting its file system.
    open: HashMap<FileSystemId, Vec<OwnedFd>>,
    paths: HashMap<Vec<u8>, Option<PathBuf>>,
}

impl Directories<'_> {
    /// The text of the path of a name in a directory; `None` if the directory is gone.
    fn path(&mut self, (id, handle, name): (FileSystemId, &[u8], &[u8])) -> Option<String> {
        let key = [&id, handle].concat();
        if !self.paths.contains_key(&key) {
            let found = self.resolve(id, handle);
            self.paths.insert(key.clone(), found);
        }
        let dir = self.paths.get(&key)?.as_ref()?;
        let path = if name == b"." { dir.clone() } else { dir.join(OsStr::from_bytes(name)) };
        Some(path_text(path))
    }

    /// The path of a directory. A bind mount shows a part of its file system only: each mount is tried.
    fn resolve(&mut self, id: FileSystemId, handle: &[u8]) -> Option<PathBuf> {
        let mounts = self.mounts.get(&id)?;
        let open = || mounts.iter().filter_map(|mount| open_mount(mount).ok()).collect();
        let mounts = self.open.entry(id).or_insert_with(open);
        mounts.iter().find_map(|mount| {
            let dir = open_handle(mount, handle).ok()?;
            let path = std::fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd())).ok()?;
            let (wanted, found) = (rustix::fs::fstat(&dir).ok()?, rustix::fs::lstat(&path).ok()?);
            ((found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)).then_some(path)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("written");
        std::fs::write(&path, "\"/a b\"\n\"/with\\nnewline\"\n\"/cut sho").unwrap();
        let read = read_journal(&path, &None).unwrap().unwrap();
        assert_eq!(read.into_iter().collect::<Vec<_>>(), ["/a b", "/with\nnewline"]);
        std::fs::write(&path, format!("\"/a\"\n{INCOMPLETE}\n\"/b\"\n")).unwrap();
        assert_eq!(read_journal(&path, &None).unwrap(), None);
        assert!(!is_ended(&path, &None).unwrap());
        std::fs::write(&path, format!("\"/a\"\n{ENDED}\n")).unwrap();
        assert!(is_ended(&path, &None).unwrap() && read_journal(&path, &None).unwrap().unwrap().len() == 1);
        std::fs::write(&path, format!("\"/a\"\n{ENDED}\n{BEGUN}\n")).unwrap();
        assert!(!is_ended(&path, &None).unwrap() && read_journal(&path, &None).unwrap().unwrap().len() == 1);
        assert!(read_journal(&dir.path().join("missing"), &None).is_err());
    }

    #[test]
    fn with_a_key_only_lines_of_its_holder_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("written");
        let key = Some([3; 32]);
        let mut file = File::create(&path).unwrap();
        begin_journal(&mut file, &key).unwrap();
        writeln!(file, "{}", sealed(&key, "\"/a\"")).unwrap();
        let read =
            |key| read_journal(&path, &key).unwrap().map(|paths| paths.into_iter().collect::<Vec<_>>());
        assert_eq!(read(key).unwrap(), ["/a"]);
        let forged = sealed(&Some([4; 32]), "\"/etc/passwd\"");
        writeln!(file, "\"/etc/shadow\"\n{forged}\n{ENDED}").unwrap();
        assert_eq!(read(key).unwrap(), ["/a"]);
        assert!(!is_ended(&path, &key).unwrap());
        writeln!(file, "{}\n{}", sealed(&key, "\"/b\""), sealed(&key, ENDED)).unwrap();
        assert_eq!(read(key).unwrap(), ["/a", "/b"]);
        assert!(is_ended(&path, &key).unwrap());
        // Another key, or the file of another snapshot: nothing is known.
        assert_eq!(read(Some([5; 32])), None);
        std::fs::write(&path, "\"/a\"\n").unwrap();
        assert_eq!(read(key), None);
    }

    #[test]
    fn events_of_other_namespaces_have_no_pid() {
        // As the kernel writes it: an event of process 7, and one of process 0, which is cut short.
        let handle = [8u32.to_ne_bytes(), 1u32.to_ne_bytes(), [9; 4], [9; 4]].concat();
        let record = [&[DIRECTORY_AND_NAME, 0, 36, 0][..], &[3; 8], &handle, b"name.txt"].concat();
        let event = |pid: i32| {
            let mut event =
                [&60u32.to_ne_bytes()[..], &[3, 0, 24, 0], &libc::FAN_MODIFY.to_ne_bytes()].concat();
            event.extend((-1i32).to_ne_bytes().iter().chain(&pid.to_ne_bytes()));
            [event, record.clone()].concat()
        };
        let both = [event(7), event(0)].concat();
        let mut rest = &both[..];
        let first = Event::parse(&mut rest).unwrap();
        assert_eq!((first.pid, first.mask), (7, libc::FAN_MODIFY));
        assert_eq!(first.named, Some(([3; 8], &handle[..], &b"name.txt"[..])));
        assert_eq!(Event::parse(&mut rest).unwrap().pid, 0);
        assert!(Event::parse(&mut rest).is_none());
        let mut cut = &both[..50];
        assert!(Event::parse(&mut cut).is_none());
    }
}
