//! Each operation of a save, a removal and a reclaiming fails once, or it and all after it, before it has done anything or
//! after it has done all. What was there before is there afterwards, and the store goes on working.

mod common;

use ckpt_snapshot::packed::PackStore;
use ckpt_snapshot::*;
use common::manifest;
use common::memory::{Judged, Memory, When};
use common::small::{holds, save, store, store_with};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static GO_ON: AtomicBool = AtomicBool::new(false);

/// Those of a broken and of a full disk, and those of NFS: a file that the server does not know any more, a request that was
/// interrupted, and one that was repeated and whose first answer was lost.
const ERRNOS: [Errno; 5] = [Errno::IO, Errno::NOSPC, Errno::STALE, Errno::INTR, Errno::EXIST];

/// Which operations fail.
#[derive(Clone, Copy, Debug)]
struct Failure {
    /// The first one, counted from 0.
    from: u64,
    /// Only that one.
    once: bool,
    errno: Errno,
}

/// What is counted and fails.
#[derive(Default)]
struct Countdown {
    is_on: AtomicBool,
    passed: AtomicU64,
    failed: AtomicU64,
}

impl Countdown {
    fn judge(&self, failure: Failure, kind: &str) -> io::Result<()> {
        let writes = matches!(kind, "create" | "append" | "finish" | "put");
        if !self.is_on.load(Ordering::SeqCst) || (failure.errno == Errno::NOSPC && !writes) {
            return Ok(());
        }
        let number = self.passed.fetch_add(1, Ordering::SeqCst);
        if number < failure.from || (failure.once && number > failure.from) {
            return Ok(());
        }
        self.failed.fetch_add(1, Ordering::SeqCst);
        Err(failure.errno.into())
    }
}

type Expected = BTreeMap<u64, Vec<u64>>;

/// Snapshots 2 and 3, one half-used pack, and one pack that is garbage if 1 and 4 are `removed`.
fn before(removed: bool) -> (Memory, Expected) {
    let memory = Memory::default();
    let store = store(memory.clone());
    let mut expected = Expected::new();
    expected.insert(1, (1..=10).collect());
    expected.insert(2, vec![1, 3, 5, 11]);
    expected.insert(3, vec![3, 12, 13, 14, 15]);
    expected.insert(4, vec![30, 31]);
    for (number, parts) in &expected {
        save(&store, *number, parts).unwrap();
    }
    if removed {
        for number in [1, 4] {
            store.remove(&manifest(number).id).unwrap();
            expected.remove(&number);
        }
    }
    (memory, expected)
}

fn assert_whole(store: &PackStore, expected: &Expected, what: &str) {
    for (number, parts) in expected {
        holds(store, *number, parts).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// Whatever is listed holds what it should; returns the numbers.
fn listed(store: &PackStore, possible: &Expected, what: &str) -> Vec<u64> {
    let listed = store.list().unwrap();
    let numbers: Vec<u64> = listed.iter().map(|one| one.id.sequence()).collect();
    for number in &numbers {
        holds(store, *number, &possible[number]).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    numbers
}

/// One phase with one failure. `certain` is there whatever happens, `possible` may be. Returns whether it came to fail.
fn run(
    phase: &str,
    failure: Failure,
    memory: Memory,
    certain: &Expected,
    possible: &Expected,
    work: impl FnOnce(&PackStore) -> Result<(), SaveError>,
) -> bool {
    let countdown = Arc::new(Countdown::default());
    let judge = Arc::clone(&countdown);
    let medium = Judged::new(memory.clone(), move |_: When, kind, _| judge.judge(failure, kind));
    let store = store_with(medium, 2);
    // As in a launcher, which has looked at its snapshots before.
    assert_whole(&store, certain, "before");
    countdown.is_on.store(true, Ordering::SeqCst);
    let result = work(&store);
    countdown.is_on.store(false, Ordering::SeqCst);
    let has_failed = countdown.failed.load(Ordering::SeqCst) > 0;
    let what = format!("{phase}, {failure:?}, {result:?}");
    assert!(has_failed || result.is_ok(), "{what}");

    assert_whole(&store, certain, &what);
    let numbers = listed(&store, possible, &what);
    if phase == "save" {
        assert!(numbers.contains(&5) || result.is_err(), "{what}");
        assert!(!numbers.contains(&5) || result.is_ok() || !failure.once, "{what}: it failed and is there");
    }
    // The same launcher continues, and so does another one.
    save(&store, 6, &[3, 20, 30, 60]).unwrap_or_else(|error| panic!("{what}: {error}"));
    for store in [store, common::small::store(memory.clone())] {
        store.sweep().unwrap();
        store.reclaim().unwrap();
        holds(&store, 6, &[3, 20, 30, 60]).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_whole(&store, certain, &what);
        let scrubbed = store.scrub(1.0, &|_| {}, &GO_ON).unwrap();
        assert!(scrubbed.damage.is_empty(), "{what}: {scrubbed:?}");
    }
    let stems = |suffix: &str| -> Vec<String> {
        memory.names(suffix).iter().map(|name| name.trim_end_matches(suffix).to_owned()).collect()
    };
    assert_eq!(stems(".pack"), stems(".index"), "{what}: something is left over");
    has_failed
}

/// Runs a phase with a failure at each operation until none fails any more. Returns how many runs failed.
fn run_all(phase: &str, removed: bool, one: impl Fn(&PackStore) -> Result<(), SaveError>) -> u64 {
    let (memory, mut certain) = before(removed);
    let mut possible = certain.clone();
    possible.insert(5, vec![1, 3, 11, 20, 21, 22, 30]);
    possible.insert(6, vec![3, 20, 30, 60]);
    if phase == "remove" {
        certain.remove(&1);
    }
    let mut runs = 0;
    for errno in ERRNOS {
        for once in [true, false] {
            let fails = |from| {
                let failure = Failure { from, once, errno };
                run(phase, failure, memory.fork(), &certain, &possible, &one)
            };
            runs += (0..).take_while(|&from| fails(from)).count() as u64;
        }
    }
    runs
}

#[test]
fn a_save_fails_at_each_operation() {
    let runs = run_all("save", false, |store| save(store, 5, &[1, 3, 11, 20, 21, 22, 30]).map(drop));
    assert!(runs > 30, "{runs}");
}

#[test]
fn a_removal_fails_at_each_operation() {
    let runs = run_all("remove", false, |store| store.remove(&manifest(1).id));
    assert!(runs >= 4, "{runs}");
}

#[test]
fn a_reclaiming_fails_at_each_operation() {
    let runs = run_all("reclaim", true, |store| {
        let done = store.reclaim()?;
        assert!(done.freed_bytes > 0 || done.moved_bytes > 0, "{done:?}");
        Ok(())
    });
    assert!(runs > 60, "{runs}");
}
