//! Everything that saves, removals and reclaimings do to the file system is recorded. Then every beginning of that is
//! played back as what a crash at that point may have left: what was made durable is there, of the rest nothing, all of
//! it, or any part. Each must be a store with all snapshots whose commit had returned, that goes on working.
//!
//! `CKPT_TEST_CRASH_LIVES=N` plays N random lives of a job instead of a few, `CKPT_TEST_CRASH_CHOICES=N` tries N random
//! choices for each point.

mod common;

use ckpt_snapshot::medium::record::{Operation, Recorder};
use ckpt_snapshot::medium::{DirMedium, IoFeatures};
use ckpt_snapshot::packed::PackStore;
use ckpt_snapshot::*;
use common::small::{PART_BYTES, content, file, holds, save, store, store_with};
use common::{manifest, noise};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Random choices of what is there of that which was not made durable, for each point.
const CHOICES: u64 = 4;
/// Random lives of a job.
const LIVES: u64 = 8;
/// The snapshot that is saved after each crash.
const NEXT: (u64, [u64; 5]) = (99, [1, 3, 13, 40, 99]);

/// What snapshots hold, by their numbers.
type Contents = BTreeMap<u64, Vec<u64>>;

/// A record of what was done, with what each step was done to.
struct History {
    operations: Vec<Operation>,
    /// For each operation: the file that it is about. Files keep their number when they get another name.
    files: Vec<Option<usize>>,
    /// For each operation: after so many operations it is durable.
    durable_after: Vec<usize>,
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

impl History {
    fn new(operations: Vec<Operation>) -> Self {
        let mut names: HashMap<PathBuf, usize> = HashMap::new();
        let mut files = Vec::new();
        let mut durable_after = vec![usize::MAX; operations.len()];
        for (at, operation) in operations.iter().enumerate() {
            files.push(match operation {
                Operation::Create { path } => {
                    names.insert(path.clone(), at);
                    Some(at)
                }
                Operation::Rename { from, to } => {
                    assert_eq!(parent(from), parent(to));
                    let file = names.remove(from).expect("it was made before");
                    names.insert(to.clone(), file);
                    Some(file)
                }
                Operation::Link { from, to } => {
                    names.insert(to.clone(), names[from]);
                    Some(names[from])
                }
                Operation::Unlink { path } => names.remove(path),
                Operation::Write { path, .. }
                | Operation::SetLength { path, .. }
                | Operation::SyncFile { path, .. } => Some(names[path]),
                Operation::MakeDir { .. } | Operation::SyncDir { .. } | Operation::Mark(_) => None,
            });
            match operation {
                Operation::SyncFile { begun, .. } => {
                    let is_covered = |&before: &usize| {
                        let is_content = matches!(
                            operations[before],
                            Operation::Write { .. } | Operation::SetLength { .. }
                        );
                        is_content && files[before] == files[at]
                    };
                    (0..*begun).filter(is_covered).for_each(|before| {
                        durable_after[before] = durable_after[before].min(at + 1);
                    });
                }
                Operation::SyncDir { path: dir, begun } => {
                    let is_covered = |&before: &usize| match &operations[before] {
                        Operation::MakeDir { path }
                        | Operation::Create { path }
                        | Operation::Unlink { path }
                        | Operation::Rename { to: path, .. }
                        | Operation::Link { to: path, .. } => {
                            parent(path) == dir && !path.as_os_str().is_empty()
                        }
                        _ => false,
                    };
                    (0..*begun).filter(is_covered).for_each(|before| {
                        durable_after[before] = durable_after[before].min(at + 1);
                    });
                }
                _ => {}
            }
        }
        Self { operations, files, durable_after }
    }

    /// What is left after a crash behind the first `count` operations. `kept` says how much of an operation that is not
    /// durable has happened, in 255ths.
    fn left(&self, count: usize, kept: impl Fn(usize) -> u8) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut dirs: BTreeSet<PathBuf> = BTreeSet::from([PathBuf::new()]);
        let mut names: BTreeMap<PathBuf, usize> = BTreeMap::new();
        let mut contents: HashMap<usize, Vec<u8>> = HashMap::new();
        for (at, operation) in self.operations[..count].iter().enumerate() {
            let kept = if self.durable_after[at] <= count { 255 } else { kept(at) };
            if kept == 0 {
                continue;
            }
            let file = self.files[at];
            match operation {
                Operation::MakeDir { path } => {
                    dirs.insert(path.clone());
                }
                Operation::Create { path } | Operation::Link { to: path, .. } => {
                    names.insert(path.clone(), file.expect("it is about a file"));
                }
                Operation::Rename { from, to } => {
                    names.remove(from);
                    names.insert(to.clone(), file.expect("it is about a file"));
                }
                Operation::Unlink { path } => {
                    names.remove(path);
                }
                Operation::Write { offset, content, .. } => {
                    let part = &content[..content.len() * usize::from(kept) / 255];
                    let begin = usize::try_from(*offset).unwrap();
                    let all = contents.entry(file.expect("it is about a file")).or_default();
                    all.resize(all.len().max(begin + part.len()), 0);
                    all[begin..begin + part.len()].copy_from_slice(part);
                }
                Operation::SetLength { bytes, .. } => {
                    let all = contents.entry(file.expect("it is about a file")).or_default();
                    all.resize(usize::try_from(*bytes).unwrap(), 0);
                }
                Operation::SyncFile { .. } | Operation::SyncDir { .. } | Operation::Mark(_) => {}
            }
        }
        let is_there = |path: &Path| path.ancestors().skip(1).all(|dir| dirs.contains(dir));
        let left = names.into_iter().filter(|(path, _)| is_there(path));
        left.map(|(path, file)| (path, contents.get(&file).cloned().unwrap_or_default())).collect()
    }

    /// What has to be there after the first `count` operations, and what may be there besides.
    fn expected(&self, count: usize) -> (BTreeSet<u64>, BTreeSet<u64>) {
        let (mut certain, mut possible) = (BTreeSet::new(), BTreeSet::new());
        for operation in &self.operations[..count] {
            let Operation::Mark(text) = operation else { continue };
            let (what, number) = text.split_once(' ').unwrap();
            let number = number.parse().unwrap();
            match what {
                "saving" => _ = possible.insert(number),
                "saved" => _ = certain.insert(number),
                "removing" => _ = certain.remove(&number),
                "removed" | "gave-up" => _ = possible.remove(&number),
                other => panic!("{other}"),
            }
        }
        (certain, possible)
    }
}

/// A source that fails in the middle.
struct Broken(Vec<u8>);

impl Source for Broken {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if offset >= 4 * PART_BYTES as u64 {
            return Err(io::Error::other("broken"));
        }
        self.0.as_slice().read_at(offset, into)
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        (offset + PART_BYTES as u64).min(self.bytes())
    }
}

/// A job's life on a recorded medium.
struct Life {
    store: PackStore,
    recorder: Recorder,
    contents: Contents,
}

impl Life {
    fn new(dir: &Path, workers: usize) -> Self {
        let recorder = Recorder::default();
        let root = dir.join("recorded");
        std::fs::create_dir(&root).unwrap();
        let store = store_with(DirMedium::recorded(root, recorder.clone()), workers);
        Self { store, recorder, contents: Contents::new() }
    }

    fn save(&mut self, number: u64, parts: &[u64]) {
        self.contents.insert(number, parts.to_vec());
        self.recorder.mark(format!("saving {number}"));
        save(&self.store, number, parts).unwrap();
        self.recorder.mark(format!("saved {number}"));
    }

    fn give_up(&mut self, number: u64, parts: &[u64]) {
        self.contents.insert(number, parts.to_vec());
        self.recorder.mark(format!("saving {number}"));
        let mut writer = self.store.begin(&manifest(number).id, 1000).unwrap();
        let broken = Broken(content(parts));
        writer.put(&[Input { path: file(), from: &broken }], &|_| {}).unwrap_err();
        drop(writer);
        self.recorder.mark(format!("gave-up {number}"));
    }

    fn remove(&mut self, number: u64) {
        self.recorder.mark(format!("removing {number}"));
        self.store.remove(&manifest(number).id).unwrap();
        self.recorder.mark(format!("removed {number}"));
    }
}

/// Saves that share chunks, one that is given up, removals, packs that go and packs that are copied over.
fn plain_life(dir: &Path, workers: usize) -> (History, Contents) {
    let mut life = Life::new(dir, workers);
    life.save(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    life.save(2, &[1, 3, 5, 11]);
    life.save(3, &[20, 21, 22, 23]);
    life.give_up(4, &[30, 31, 32, 33, 34, 35]);
    life.save(5, &[3, 12, 13, 14]);
    life.remove(1);
    life.remove(3);
    let done = life.store.reclaim().unwrap();
    // Who of several threads takes which chunk is a matter of luck.
    assert!(done.freed_bytes > 0 && (done.moved_bytes > 0 || workers > 1), "{done:?}");
    life.save(6, &[1, 2, 13, 40, 41]);
    life.remove(2);
    life.remove(5);
    life.store.reclaim().unwrap();
    life.save(7, &[1, 20, 30, 40]);
    for (number, parts) in &life.contents {
        let is_there = [6, 7].contains(number);
        assert_eq!(holds(&life.store, *number, parts).is_ok(), is_there, "{number}");
    }
    (History::new(life.recorder.operations()), life.contents)
}

/// Random operations, with two threads, so that several packs are written concurrently.
fn random_life(dir: &Path, seed: u64) -> (History, Contents) {
    let mut life = Life::new(dir, 2);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut roll = |sides: u64| random.u64(..sides);
    let mut there: Vec<u64> = Vec::new();
    for number in 1..=12 {
        let first = roll(20);
        let parts: Vec<u64> = (0..=roll(12)).map(|_| first + roll(24)).collect();
        match roll(8) {
            0 => life.give_up(number, &[&[100, 101, 102, 103][..], &parts, &[104]].concat()),
            _ => {
                life.save(number, &parts);
                there.push(number);
            }
        }
        if there.len() > 3 {
            let oldest = usize::try_from(roll(there.len() as u64)).unwrap();
            life.remove(there.remove(oldest));
        }
        if roll(3) == 0 {
            life.store.reclaim().unwrap();
        }
    }
    for number in &there {
        holds(&life.store, *number, &life.contents[number]).unwrap();
    }
    (History::new(life.recorder.operations()), life.contents)
}

/// A store that is opened after a crash; without what takes long to set up.
fn open(dir: &Path) -> PackStore {
    store(DirMedium::new(dir.to_owned()).with_io_features(IoFeatures { direct: false, ring: false }))
}

/// Takes over after a crash that left `left`.
fn take_over(
    dir: &Path,
    left: &BTreeMap<PathBuf, Vec<u8>>,
    contents: &Contents,
    (certain, possible): &(BTreeSet<u64>, BTreeSet<u64>),
) -> Result<(), String> {
    for (path, content) in left {
        let path = dir.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    let store = open(dir);
    let text = |error: SaveError| error.to_string();
    store.sweep().map_err(text)?;
    let mut found = BTreeSet::new();
    for one in store.list().map_err(|error| error.to_string())? {
        let number = one.id.sequence();
        one.manifest.map_err(|error| error.to_string())?;
        if !certain.contains(&number) && !possible.contains(&number) {
            return Err(format!("{number} is there, which should not be"));
        }
        holds(&store, number, &contents[&number])?;
        found.insert(number);
    }
    if let Some(lost) = certain.difference(&found).next() {
        return Err(format!("{lost} is lost"));
    }
    save(&store, NEXT.0, &NEXT.1).map_err(text)?;
    store.reclaim().map_err(text)?;
    let later = open(dir);
    holds(&later, NEXT.0, &NEXT.1)?;
    found.iter().try_for_each(|number| holds(&later, *number, &contents[number]))?;
    let scrubbed = later.scrub(1.0, &|_| {}, &AtomicBool::new(false)).map_err(|error| error.to_string())?;
    if scrubbed.damage.is_empty() { nothing_is_left_over(dir) } else { Err(format!("{scrubbed:?}")) }
}

fn nothing_is_left_over(dir: &Path) -> Result<(), String> {
    let names: BTreeSet<String> = std::fs::read_dir(dir.join("packs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let has_both = |name: &String| match name.rsplit_once('.') {
        Some((stem, "pack")) => names.contains(&format!("{stem}.index")),
        Some((stem, "index")) => names.contains(&format!("{stem}.pack")),
        _ => false,
    };
    match names.iter().find(|name| !has_both(name)) {
        Some(name) => Err(format!("{name} is left over")),
        None => Ok(()),
    }
}

/// A crash: after so many operations, and a number for what has happened of those that are not durable.
type Crash = (usize, u64);

/// How much has happened of the operation `at`: nothing, all, all but half of the last write, or anything.
fn kept(history: &History, (count, choice): Crash, at: usize, dice: &[u8]) -> u8 {
    let is_write = |at: &usize| matches!(history.operations[*at], Operation::Write { .. });
    match choice {
        0 => 0,
        1 => 255,
        2 if (0..count).rev().find(is_write) == Some(at) => 127,
        2 => 255,
        _ => match dice[at] {
            0..100 => 0,
            100..200 => 255,
            part if is_write(&at) => part,
            _ => 255,
        },
    }
}

fn number_of(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Tries crashes at every point of one life. Returns how many, and how many of them left something different.
fn crash_everywhere(live: impl FnOnce(&Path) -> (History, Contents)) -> (usize, usize) {
    let shm = Path::new("/dev/shm");
    let base = if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() }.unwrap();
    let (history, contents) = live(base.path());
    let choices = 3 + number_of("CKPT_TEST_CRASH_CHOICES", CHOICES);
    let crashes: Vec<Crash> = (0..=history.operations.len())
        .flat_map(|count| (0..choices).map(move |choice| (count, choice)))
        .collect();
    let (next, tried) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let seen = Mutex::new(HashSet::new());
    let work = |thread: usize| {
        while let Some(&crash) = crashes.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (count, choice) = crash;
            let bits = noise(choice + 1000 * count as u64, count);
            let left = history.left(count, |at| kept(&history, crash, at, &bits));
            let expected = history.expected(count);
            if !seen.lock().unwrap().insert((left.clone(), expected.clone())) {
                continue;
            }
            tried.fetch_add(1, Ordering::Relaxed);
            let dir = base.path().join(format!("crash-{thread}"));
            if let Err(error) = take_over(&dir, &left, &contents, &expected) {
                let files: Vec<_> = left.iter().map(|(path, content)| (path, content.len())).collect();
                panic!("crash {crash:?}: {error}\nexpected {expected:?}\nleft {files:#?}");
            }
            std::fs::remove_dir_all(&dir).unwrap();
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
    (crashes.len(), tried.into_inner())
}

#[test]
fn every_crash_leaves_a_store_with_all_that_was_committed() {
    for workers in [1, 2] {
        let (crashes, different) = crash_everywhere(|dir| plain_life(dir, workers));
        assert!(crashes > 1000 && different > 100, "{different} of {crashes}");
    }
}

#[test]
fn so_does_every_crash_in_whatever_life() {
    let (mut crashes, mut different) = (0, 0);
    let lives = number_of("CKPT_TEST_CRASH_LIVES", LIVES);
    for seed in 0..lives {
        let (more, more_different) = crash_everywhere(|dir| random_life(dir, seed));
        crashes += more;
        different += more_different;
    }
    println!("{lives} lives, {crashes} crashes, {different} of them different");
    assert!(different as u64 > 100 * lives, "{different} of {crashes}");
}
