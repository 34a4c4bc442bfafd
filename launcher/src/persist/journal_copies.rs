//! Copies of the job's journal beside its snapshots in an object store, so that `report` and `explain` know what has happened
//! on other machines.
//!
//! ```text
//!   start:  journals/* of others ──► journal.jsonl here ──► journals/LAUNCHER.1; those of others are deleted
//!   later:  new entries ──► journals/LAUNCHER.2; journals/LAUNCHER.1 is deleted
//! ```
//!
//! Each copy is the whole journal, with what it had of other machines. With a key it is encrypted. Nothing depends on copies:
//! what cannot be written is tried again later, and reported once.

use crate::job::claim::ClaimedJob;
use crate::job::journal::{Entry, EventKind, Journal, with_others};
use crate::job::ownership::OwnershipError;
use crate::job::times;
use crate::store::options::StoreOptions;
use crate::store::tiers;
use crate::sys::deadline::{JOURNAL_COPY_INTERVAL, JOURNAL_LAST_COPY_TIMEOUT};
use crate::sys::host;
use anyhow::Result;
use ckpt_object_medium::Options;
use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::medium::{Medium, read_all};
use ckpt_snapshot::{JobDir, RelPath, sealed};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded, unbounded};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// The folder of all copies.
const FOLDER: &str = "journals";
const MAGIC: &sealed::Magic = b"CKPTJRNL";
/// A longer copy is damaged (bytes). A journal has 4 MiB.
const MAX_BYTES: u64 = 16 << 20;
/// How often copies are listed, as they are replaced while they are read.
const READ_TRIES: u32 = 3;

/// Copies the journal until it is dropped, after [`Journal::end_listening`].
pub struct JournalCopies {
    is_done: Receiver<()>,
}

/// The copies of one job.
struct Folder {
    medium: Arc<dyn Medium>,
    codec: Codec,
}

struct Work {
    folder: Folder,
    journal: Arc<Journal>,
    check: Check,
    /// The launcher's name in the names of objects.
    launcher: String,
    /// The number of its last copy.
    number: u64,
    /// Whether what others had copied is in the journal here.
    is_merged: bool,
    /// Objects that are to be deleted once there is a newer copy.
    outdated: BTreeSet<String>,
    is_failure_reported: bool,
    is_removal_reported: bool,
}

/// Checks that the job is still this launcher's.
type Check = Box<dyn Fn() -> Result<(), OwnershipError> + Send>;

/// How a copy went.
enum Copied {
    Done,
    /// It is tried again.
    NotYet,
    /// Another launcher has the job.
    Refused,
}

impl JournalCopies {
    /// Starts the thread; `None` if the job has no snapshots in an object store, or there can be no more threads. Nothing is sent
    /// yet.
    #[must_use]
    pub fn start(
        options: &StoreOptions,
        dir: &JobDir,
        claimed: &ClaimedJob,
        journal: &Arc<Journal>,
    ) -> Option<Self> {
        let uploads = claimed.handover.as_ref().map(|handover| handover.records().medium());
        let medium = dir.records_medium().cloned().or(uploads)?;
        let (ownership, handover) = (Arc::clone(&claimed.ownership), claimed.handover.clone());
        let launcher = ownership.record().launcher;
        let check = move || {
            ownership.check()?;
            handover.as_ref().map_or(Ok(()), |handover| handover.check())
        };
        let work = Work {
            folder: Folder { medium, codec: options.codec() },
            journal: Arc::clone(journal),
            check: Box::new(check),
            launcher: launcher.split('@').next().unwrap_or_default().to_owned(),
            number: 0,
            is_merged: false,
            outdated: BTreeSet::new(),
            is_failure_reported: false,
            is_removal_reported: false,
        };
        let (entries_of, entries) = unbounded();
        let (done, is_done) = bounded(0);
        let work = move || {
            work.serve(&entries);
            drop::<crossbeam_channel::Sender<()>>(done);
        };
        let thread = std::thread::Builder::new().name("journal".to_owned()).spawn(work);
        thread
            .inspect_err(|error| tracing::warn!("the journal is not copied into the object store: {error}"))
            .ok()?;
        journal.listen(entries_of);
        Some(Self { is_done })
    }
}

impl Drop for JournalCopies {
    fn drop(&mut self) {
        if self.is_done.recv_timeout(JOURNAL_LAST_COPY_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::debug!("the last copy of the journal is not in the object store");
        }
    }
}

impl Work {
    fn serve(mut self, entries: &Receiver<Entry>) {
        let mut due = Some(Instant::now());
        let mut earliest = Instant::now();
        loop {
            let next = match due {
                Some(due) => entries.recv_deadline(due),
                None => entries.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok(entry) => {
                    let at = if is_routine(entry.kind) { earliest } else { Instant::now() };
                    due = Some(due.map_or(at, |due| due.min(at)));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let copied = self.copy();
                    earliest = Instant::now() + JOURNAL_COPY_INTERVAL;
                    due = match copied {
                        Copied::Done => None,
                        Copied::NotYet => Some(earliest),
                        Copied::Refused => return,
                    };
                }
                Err(RecvTimeoutError::Disconnected) => {
                    if due.is_some() {
                        self.copy();
                    }
                    return;
                }
            }
        }
    }

    fn copy(&mut self) -> Copied {
        let copied = match (self.check)() {
            Err(OwnershipError::ClaimedElsewhere(_)) => return Copied::Refused,
            Err(OwnershipError::Store(error)) => Err(io::Error::other(error)),
            Ok(()) => self.merge().and_then(|()| self.put()),
        };
        let Err(error) = copied else { return Copied::Done };
        if !std::mem::replace(&mut self.is_failure_reported, true) {
            tracing::warn!(
                "the journal is not in the object store yet, where `ckpt-run report` on other machines looks for it: {error}. It is tried again"
            );
        }
        Copied::NotYet
    }

    fn merge(&mut self) -> io::Result<()> {
        if self.is_merged {
            return Ok(());
        }
        for name in self.folder.names()? {
            match self.folder.read(&name) {
                Ok(entries) => {
                    self.journal.add_others(entries)?;
                    self.outdated.insert(name);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => tracing::debug!("{error}"),
                Err(error) => return Err(error),
            }
        }
        self.is_merged = true;
        Ok(())
    }

    fn put(&mut self) -> io::Result<()> {
        let name = format!("{}.{}", self.launcher, self.number + 1);
        match self.folder.put(&name, &self.journal.entries()?) {
            // An earlier put was answered with an error, and had succeeded.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.number += 1;
                self.outdated.insert(name);
                return Err(error);
            }
            other => other?,
        }
        self.number += 1;
        let outdated = std::mem::replace(&mut self.outdated, BTreeSet::from([name]));
        for old in outdated {
            if let Err(error) = self.folder.medium.remove(&in_folder(&old)) {
                // It is tried again after the next copy. Two copies say the same.
                self.outdated.insert(old);
                if !std::mem::replace(&mut self.is_removal_reported, true) {
                    tracing::warn!(
                        "an older copy of the journal cannot be deleted from the object store: {error}"
                    );
                }
            }
        }
        Ok(())
    }
}

/// What is copied at intervals only.
fn is_routine(kind: EventKind) -> bool {
    use EventKind::{InMemory, NotSaved, Noted, Output, RankLate, Saved, Waiting};
    matches!(kind, Saved | InMemory | NotSaved | Noted | Output | RankLate | Waiting)
}

impl Folder {
    fn names(&self) -> io::Result<Vec<String>> {
        let listed = self.medium.list(&RelPath::new(FOLDER).expect("a plain path"))?;
        let names = listed.into_iter().map(|(name, _)| name);
        Ok(names.filter(|name| RelPath::new(format!("{FOLDER}/{name}")).is_ok()).collect())
    }

    fn read(&self, name: &str) -> io::Result<Vec<Entry>> {
        let path = in_folder(name);
        let bytes = read_all(&*self.medium, &path, MAX_BYTES)?;
        let lines = sealed::open(MAGIC, path.as_str(), &bytes, &self.codec).map_err(|error| {
            let text = format!("{}: {error}", self.medium.describe(&path));
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
        Ok(Entry::in_lines(&lines).collect())
    }

    fn put(&self, name: &str, entries: &[Entry]) -> io::Result<()> {
        let path = in_folder(name);
        let object = sealed::seal(MAGIC, path.as_str(), Entry::lines(entries), &self.codec);
        self.medium.put_new(&path, &object)
    }
}

fn in_folder(name: &str) -> RelPath {
    RelPath::new(format!("{FOLDER}/{name}")).expect("a plain path")
}

/// The entries of the journal here, and of its copies in the object store, if the job has any. Those that cannot be read are
/// left out, with a warning.
///
/// # Errors
/// When the journal here cannot be read.
pub fn of_all_machines(options: &StoreOptions, dir: &JobDir) -> Result<Vec<Entry>> {
    let mut all = others(options, dir).unwrap_or_else(|error| {
        tracing::warn!(
            "what has happened to the job {} on other machines is not known: {error:#}",
            dir.key()
        );
        Vec::new()
    });
    all.push(Journal::of(dir).entries()?);
    // The longest one most likely has all entries, in the order in which a launcher has brought them.
    all.sort_by_key(Vec::len);
    let longest = all.pop().unwrap_or_default();
    Ok(with_others(longest, all.concat(), None))
}

/// Whether the launcher that has begun last may run on another machine, whose lock of the job is not seen here: the job has an
/// object store.
#[must_use]
pub fn may_run_elsewhere(options: &StoreOptions, dir: &JobDir, entries: &[Entry]) -> bool {
    let has_objects = dir.records_medium().is_some() || options.upload.is_some();
    let host = times::newest_host(entries);
    has_objects && !dir.is_locked() && host.is_some_and(|host| host != host::facts().hostname)
}

fn others(options: &StoreOptions, dir: &JobDir) -> Result<Vec<Vec<Entry>>> {
    let client = Options { retry: options.short_retry(), ..Options::default() };
    let medium = match dir.records_medium().cloned() {
        Some(medium) => medium,
        None => match tiers::uploads(options, dir, client)? {
            Some(medium) => medium,
            None => return Ok(Vec::new()),
        },
    };
    let folder = Folder { medium, codec: options.codec() };
    let (mut entries, mut seen) = (Vec::new(), BTreeSet::new());
    for _ in 0..READ_TRIES {
        let mut is_complete = true;
        for name in folder.names()? {
            if !seen.insert(name.clone()) {
                continue;
            }
            match folder.read(&name) {
                Ok(read) => entries.push(read),
                // There is a newer one.
                Err(error) if error.kind() == io::ErrorKind::NotFound => is_complete = false,
                Err(error) => tracing::warn!("a copy of the journal is left out: {error}"),
            }
        }
        if is_complete {
            break;
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::ownership::ClaimedElsewhere;
    use ckpt_snapshot::codec::{Compression, Key};
    use ckpt_snapshot::medium::{DirMedium, ObjectReader, ObjectWriter};
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, SystemTime};

    /// An object store, and a machine's own directory.
    struct Place {
        dir: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Self {
            Self { dir: tempfile::tempdir().unwrap() }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn journal(&self, machine: &str) -> Arc<Journal> {
            let root = StoreRoot::open_or_create(&self.path(machine)).unwrap();
            let job = root.job(&JobKey::named("job").unwrap());
            fs::create_dir_all(job.path()).unwrap();
            Arc::new(Journal::of(&job))
        }

        fn folder(&self, codec: &Codec) -> Folder {
            Folder { medium: Arc::new(DirMedium::new(self.path("objects"))), codec: codec.clone() }
        }

        fn work(&self, launcher: &str, journal: &Arc<Journal>, codec: &Codec) -> Work {
            Work {
                folder: self.folder(codec),
                journal: Arc::clone(journal),
                check: Box::new(|| Ok(())),
                launcher: launcher.to_owned(),
                number: 0,
                is_merged: false,
                outdated: BTreeSet::new(),
                is_failure_reported: false,
                is_removal_reported: false,
            }
        }

        fn names(&self, codec: &Codec) -> Vec<String> {
            let mut names = self.folder(codec).names().unwrap();
            names.sort();
            names
        }
    }

    fn key(dir: &Path, bytes: &str) -> Key {
        let file = dir.join("key");
        fs::write(&file, bytes).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        Key::from_file(&file).unwrap()
    }

    fn texts(entries: &[Entry]) -> Vec<&str> {
        entries.iter().map(|entry| entry.what.as_str()).collect()
    }

    #[test]
    fn the_journal_goes_with_the_job() {
        let place = Place::new();
        let key = key(place.dir.path(), &"5a".repeat(31).chars().chain("00".chars()).collect::<String>());
        for codec in [Codec::default(), Codec::new(Compression::default(), Some(&key))] {
            let _ = fs::remove_dir_all(place.path("objects"));
            let _ = fs::remove_dir_all(place.path("one"));
            let _ = fs::remove_dir_all(place.path("two"));
            let (one, two) = (place.journal("one"), place.journal("two"));
            one.add(&Entry::new(EventKind::Started, "on one"));
            let mut first = place.work("a", &one, &codec);
            assert!(matches!(first.copy(), Copied::Done));
            one.add(&Entry::new(EventKind::Saved, "saved on one"));
            assert!(matches!(first.copy(), Copied::Done));
            assert_eq!(place.names(&codec), ["a.2"], "one copy");
            let object = fs::read(place.path("objects/journals/a.2")).unwrap();
            assert_eq!(object.windows(6).any(|text| text == b"on one"), codec.key_number() == 0);

            two.add(&Entry::new(EventKind::LauncherStarted, "on two"));
            let mut second = place.work("b", &two, &codec);
            assert!(matches!(second.copy(), Copied::Done));
            let all = ["on one", "saved on one", "on two"];
            assert_eq!(texts(&two.entries().unwrap()), all);
            assert_eq!(place.names(&codec), ["b.1"]);
            assert_eq!(texts(&place.folder(&codec).read("b.1").unwrap()), all);
        }
    }

    #[test]
    fn what_cannot_be_read_stays_and_harms_nothing() {
        let place = Place::new();
        let (one, two, codec) = (place.journal("one"), place.journal("two"), Codec::default());
        one.add(&Entry::new(EventKind::Started, "on one"));
        place.work("a", &one, &codec).copy();
        let path = place.path("objects/journals/a.1");
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            let error = place.folder(&codec).read("a.1").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{at}");
        }
        two.add(&Entry::new(EventKind::Started, "on two"));
        assert!(matches!(place.work("b", &two, &codec).copy(), Copied::Done));
        assert_eq!(texts(&two.entries().unwrap()), ["on two"]);
        assert_eq!(place.names(&codec), ["a.1", "b.1"]);
        // Under another name it is not the same object.
        let key = Codec::new(Compression::default(), Some(&key(place.dir.path(), &"5a01".repeat(16))));
        place.work("c", &one, &key).copy();
        fs::rename(place.path("objects/journals/c.1"), place.path("objects/journals/c.7")).unwrap();
        assert!(place.folder(&key).read("c.7").is_err());
    }

    /// A medium that deletes nothing for a while.
    #[derive(Debug)]
    struct Kept {
        inner: DirMedium,
        is_kept: AtomicBool,
    }

    impl Medium for Kept {
        fn describe(&self, name: &RelPath) -> String {
            self.inner.describe(name)
        }

        fn create(
            &self,
            name: &RelPath,
            blocks: usize,
            block_bytes: usize,
        ) -> io::Result<Box<dyn ObjectWriter>> {
            self.inner.create(name, blocks, block_bytes)
        }

        fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
            self.inner.put_new(name, content)
        }

        fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
            self.inner.open(name)
        }

        fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
            self.inner.list(dir)
        }

        fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
            self.inner.list_times(dir)
        }

        fn remove(&self, name: &RelPath) -> io::Result<()> {
            match self.is_kept.load(Ordering::SeqCst) {
                true => Err(io::ErrorKind::PermissionDenied.into()),
                false => self.inner.remove(name),
            }
        }

        fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
            self.inner.sweep(age)
        }

        fn free_bytes(&self) -> io::Result<Option<u64>> {
            self.inner.free_bytes()
        }
    }

    #[test]
    fn copies_that_cannot_be_deleted_are_deleted_later() {
        let place = Place::new();
        let (journal, codec) = (place.journal("one"), Codec::default());
        journal.add(&Entry::new(EventKind::Started, "on one"));
        let inner = DirMedium::new(place.path("objects"));
        let medium = Arc::new(Kept { inner, is_kept: AtomicBool::new(true) });
        let mut work = place.work("a", &journal, &codec);
        work.folder.medium = Arc::clone(&medium) as Arc<dyn Medium>;
        for _ in 0..3 {
            assert!(matches!(work.copy(), Copied::Done), "it is not made again for that");
        }
        assert_eq!(place.names(&codec), ["a.1", "a.2", "a.3"]);
        medium.is_kept.store(false, Ordering::SeqCst);
        assert!(matches!(work.copy(), Copied::Done));
        assert_eq!(place.names(&codec), ["a.4"]);
    }

    #[test]
    fn a_launcher_that_has_lost_the_job_copies_nothing() {
        let place = Place::new();
        let (journal, codec) = (place.journal("one"), Codec::default());
        journal.add(&Entry::new(EventKind::Started, "on one"));
        let mut work = place.work("a", &journal, &codec);
        work.check = Box::new(|| {
            let (job, by) = ("job".to_owned(), String::new());
            Err(ClaimedElsewhere { job, by }.into())
        });
        assert!(matches!(work.copy(), Copied::Refused));
        assert!(place.names(&codec).is_empty());
        work.check =
            Box::new(|| Err(OwnershipError::Store(ckpt_snapshot::OpenError::BadName(String::new()))));
        assert!(matches!(work.copy(), Copied::NotYet));
        assert!(place.names(&codec).is_empty());
        work.check = Box::new(|| Ok(()));
        assert!(matches!(work.copy(), Copied::Done));
        assert_eq!(place.names(&codec), ["a.1"]);
    }
}
