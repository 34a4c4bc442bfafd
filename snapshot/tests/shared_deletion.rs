//! Two machines that know nothing of each other delete from one store, or one of them saves: each stands still at each of
//! its operations while the other one works, whatever their clocks say. What is committed stays whole.

mod common;

use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use common::manifest;
use common::memory::{Judged, Memory, When};
use common::small::{holds, save};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// More operations than any of these machines makes.
const OPERATIONS_MAX: usize = 200;

/// The machine 0 works up to its operation `stops[0]`, then the machine 1 up to its own, then 0 to its end, then 1.
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    turn: usize,
    stops: [usize; 2],
    done: [usize; 2],
    has_ended: [bool; 2],
}

impl Turns {
    fn new(stops: [usize; 2]) -> Arc<Self> {
        let state = State { turn: 0, stops, done: [0; 2], has_ended: [false; 2] };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn wait(&self, me: usize) {
        let wait = self.changed.wait_while(self.state.lock().unwrap(), |state| state.turn != me);
        drop(wait.unwrap());
    }

    /// Before each operation of the machine `me`.
    fn operation(&self, me: usize) {
        {
            let mut state = self.state.lock().unwrap();
            let stops = state.done[me] == state.stops[me];
            state.done[me] += 1;
            if !stops || state.has_ended[1 - me] {
                return;
            }
            state.turn = 1 - me;
        }
        self.changed.notify_all();
        self.wait(me);
    }

    fn end(&self, me: usize) {
        let mut state = self.state.lock().unwrap();
        (state.has_ended[me], state.turn) = (true, 1 - me);
        self.changed.notify_all();
    }
}

type Work = fn(&PackStore) -> Result<(), SaveError>;

/// Both work on a copy of `memory`, with one order of their turns. Returns it with their results, and whether both have
/// come to their stops.
fn take_turns(
    memory: &Memory,
    stops: [usize; 2],
    works: [Work; 2],
) -> (Memory, [Result<(), SaveError>; 2], [bool; 2]) {
    let memory = memory.fork();
    let turns = Turns::new(stops);
    let threads = [0, 1].map(|me| {
        let (memory, turns, work) = (memory.clone(), Arc::clone(&turns), works[me]);
        std::thread::spawn(move || {
            turns.wait(me);
            let at = Arc::clone(&turns);
            let judge = move |when, _: &str, _: &str| {
                if when == When::Before {
                    at.operation(me);
                }
                Ok(())
            };
            let done = work(&store(Judged::new(memory, judge)));
            turns.end(me);
            done
        })
    });
    let results = threads.map(|thread| thread.join().unwrap());
    let state = turns.state.lock().unwrap();
    let are_stopped = [0, 1].map(|me| state.done[me] > state.stops[me]);
    (memory, results, are_stopped)
}

fn store(medium: impl medium::Medium + 'static) -> PackStore {
    // As if each clock were wrong by days: every pack seems to be old.
    let shared = Some(Duration::ZERO);
    let limits = Limits { workers: 1, loaders: 1, pack_bytes: 2000, shared, ..Limits::remote() };
    PackStore::new(Arc::new(medium), Codec::default(), limits)
}

/// All orders. `check` looks at each end state. Returns how often each result of the two was seen.
fn all_orders(
    memory: &Memory,
    works: [Work; 2],
    check: impl Fn(&Memory, &[bool; 2]),
) -> BTreeMap<[String; 2], u32> {
    let mut seen = BTreeMap::new();
    for first in 0..OPERATIONS_MAX {
        let mut is_first_over = false;
        for second in 0..OPERATIONS_MAX {
            let (memory, results, are_stopped) = take_turns(memory, [first, second], works);
            is_first_over = !are_stopped[0];
            check(&memory, &results.each_ref().map(Result::is_ok));
            let name = |result: &Result<(), SaveError>| match result {
                Ok(()) => "ok".to_owned(),
                Err(SaveError::Overtaken(_)) => "overtaken".to_owned(),
                Err(error) => panic!("{first} {second}: {error}"),
            };
            *seen.entry(results.each_ref().map(name)).or_default() += 1;
            if !are_stopped[1] {
                break;
            }
        }
        if is_first_over {
            return seen;
        }
    }
    panic!("more than {OPERATIONS_MAX} operations");
}

fn collect(store: &PackStore) -> Result<(), SaveError> {
    store.sweep()?;
    store.reclaim().map(drop)
}

/// What it saves is in packs that nobody needs, or new.
fn save_again(store: &PackStore) -> Result<(), SaveError> {
    save(store, 3, &[1, 2, 3, 4, 5, 6]).map(drop)
}

/// Two snapshots, of which one is deleted.
fn with_garbage() -> Memory {
    let memory = Memory::default();
    let one = store(memory.clone());
    save(&one, 1, &[1, 2, 3, 10, 11]).unwrap();
    save(&one, 2, &[9, 10, 11]).unwrap();
    one.remove(&manifest(1).id).unwrap();
    memory
}

fn tombstones(memory: &Memory) -> usize {
    memory.objects().into_keys().filter(|name| name.starts_with("tombstones/")).count()
}

/// The snapshots that are there are whole, and the next one is.
fn check_snapshots(memory: &Memory, is_saved: bool) {
    let last = store(memory.clone());
    holds(&last, 2, &[9, 10, 11]).unwrap();
    let found = holds(&last, 3, &[1, 2, 3, 4, 5, 6]);
    assert!(found.is_ok() || !is_saved, "{found:?}");
    assert_eq!(last.list().unwrap().len(), if is_saved { 2 } else { 1 });
    save(&last, 4, &[1, 2, 3, 4]).unwrap();
    collect(&last).unwrap();
    holds(&last, 4, &[1, 2, 3, 4]).unwrap();
    holds(&last, 2, &[9, 10, 11]).unwrap();
    assert_eq!(tombstones(memory), 0, "{:?}", memory.names(""));
}

#[test]
fn a_snapshot_beside_a_deletion_is_whole_or_is_not_there() {
    let memory = with_garbage();
    let seen = all_orders(&memory, [save_again, collect], |memory, done| check_snapshots(memory, done[0]));
    let [ok, overtaken] = ["ok", "overtaken"].map(|first| [first.to_owned(), "ok".to_owned()]);
    assert!(seen.len() == 2 && seen[&ok] > 20 && seen[&overtaken] > 20, "{seen:?}");
    let seen = all_orders(&memory, [collect, save_again], |memory, done| check_snapshots(memory, done[1]));
    let [ok, overtaken] = ["ok", "overtaken"].map(|second| ["ok".to_owned(), second.to_owned()]);
    assert!(seen.len() == 2 && seen[&ok] > 20 && seen[&overtaken] > 20, "{seen:?}");
}

/// Both copy what is live in the same packs, and delete these packs; or delete the copies of the other one.
#[test]
fn two_deletions_leave_what_is_live() {
    let seen = all_orders(&with_garbage(), [collect, collect], |memory, _| check_snapshots(memory, false));
    assert!(seen.len() == 1 && *seen.values().next().unwrap() > 100, "{seen:?}");
}

/// Whoever had set it could not remove it.
#[test]
fn a_tombstone_that_was_left_goes_with_its_packs() {
    let memory = with_garbage();
    let fails = |when, kind: &str, name: &str| match (when, kind) {
        (When::Before, "remove") if name.ends_with(".pack") => Err(std::io::Error::other("no answer")),
        _ => Ok(()),
    };
    collect(&store(Judged::new(memory.clone(), fails))).unwrap_err();
    assert_eq!(tombstones(&memory), 1);
    let last = store(memory.clone());
    save(&last, 3, &[1, 2, 3]).unwrap();
    collect(&last).unwrap();
    collect(&last).unwrap();
    holds(&last, 3, &[1, 2, 3]).unwrap();
    holds(&last, 2, &[9, 10, 11]).unwrap();
    assert_eq!(tombstones(&memory), 0, "{:?}", memory.names(""));
}
