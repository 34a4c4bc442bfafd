//! Two machines that know nothing of each other delete from one store, or one of them saves: each stands still at each of
//! its operations while the other one works, whatever their clocks say; or ends there, or its commit fails. What is
//! committed stays whole.

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

/// What becomes of the machine 0.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It goes on after its stop.
    GoesOn,
    /// It is killed there.
    Ends,
    /// It goes on, and the store refuses its manifest.
    IsRefused,
}

/// What the machines do.
#[derive(Clone, Copy)]
struct Plan {
    works: [Work; 2],
    fate: Fate,
    /// See [`Limits`].
    keeps_unfinished: bool,
}

/// Both work on a copy of `memory`, with one order of their turns. Returns it with their results, and whether both have
/// come to their stops.
fn take_turns(
    memory: &Memory,
    stops: [usize; 2],
    Plan { works, fate, keeps_unfinished }: Plan,
) -> (Memory, [Result<(), SaveError>; 2], [bool; 2]) {
    let memory = memory.fork();
    let turns = Turns::new(stops);
    let threads = [0, 1].map(|me| {
        let (memory, turns, work) = (memory.clone(), Arc::clone(&turns), works[me]);
        std::thread::spawn(move || {
            turns.wait(me);
            let at = Arc::clone(&turns);
            let judge = move |when, kind: &str, name: &str| {
                if when == When::Before {
                    at.operation(me);
                }
                let is_refused = fate == Fate::IsRefused && kind == "put" && name.starts_with("manifests/");
                let is_dead = fate == Fate::Ends && at.state.lock().unwrap().done[me] > stops[me];
                if me == 0 && when == When::Before && (is_refused || is_dead) {
                    return Err(std::io::Error::other("no answer"));
                }
                Ok(())
            };
            let done = work(&store_with(Judged::new(memory, judge), keeps_unfinished));
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
    store_with(medium, true)
}

fn store_with(medium: impl medium::Medium + 'static, keeps_unfinished: bool) -> PackStore {
    // As if each clock were wrong by days: every pack seems to be old.
    let shared = Some(Duration::ZERO);
    let limits =
        Limits { workers: 1, loaders: 1, pack_bytes: 2000, shared, keeps_unfinished, ..Limits::remote() };
    PackStore::new(Arc::new(medium), Codec::default(), limits)
}

/// A third of all orders, all with `cargo xtask test --full`. `check` looks at each end state. Returns how often each result of the two was seen.
fn all_orders(
    memory: &Memory,
    plan: Plan,
    check: impl Fn(&Memory, &[bool; 2]),
) -> BTreeMap<[&'static str; 2], u32> {
    let step = if std::env::var_os("CKPT_TEST_KILLS").is_some() { 1 } else { 3 };
    let mut seen = BTreeMap::new();
    for first in 0..OPERATIONS_MAX {
        let mut is_first_over = false;
        // All of them take half a minute.
        for second in (first % step..OPERATIONS_MAX).step_by(step) {
            let (memory, results, are_stopped) = take_turns(memory, [first, second], plan);
            is_first_over = !are_stopped[0];
            check(&memory, &results.each_ref().map(Result::is_ok));
            let name = |(me, result): (usize, &Result<(), SaveError>)| match result {
                Ok(()) => "ok",
                Err(SaveError::Overtaken(_)) => "overtaken",
                Err(_) if me == 0 && plan.fate != Fate::GoesOn => "failed",
                Err(error) => panic!("{first} {second}: {error}"),
            };
            let [one, other] = &results;
            *seen.entry([name((0, one)), name((1, other))]).or_default() += 1;
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

fn save_same(store: &PackStore) -> Result<(), SaveError> {
    save(store, 4, &[1, 2, 3, 4, 5, 6]).map(drop)
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

/// What was committed is whole, and the next snapshot is. `saved` are numbers of snapshots that somebody was told to be
/// stored; others may be there if their machine has ended.
fn check_snapshots(memory: &Memory, saved: &[u64], ends: bool) {
    let last = store(memory.clone());
    let is_whole = |number: u64| {
        let parts: &[u64] = if number == 2 { &[9, 10, 11] } else { &[1, 2, 3, 4, 5, 6] };
        holds(&last, number, parts)
    };
    for number in [&[2], saved].concat() {
        is_whole(number).unwrap();
    }
    let there = last.list().unwrap().len();
    assert!(there == saved.len() + 1 || ends && there > saved.len(), "{there} {saved:?}");
    save(&last, 5, &[1, 2, 3, 4, 5, 6]).unwrap();
    collect(&last).unwrap();
    for number in [&[2, 5], saved].concat() {
        is_whole(number).unwrap();
    }
    assert!(ends || tombstones(memory) == 0, "{:?}", memory.names(""));
}

const GOES_ON: Plan = Plan { works: [save_again, collect], fate: Fate::GoesOn, keeps_unfinished: true };

#[test]
fn a_snapshot_beside_a_deletion_is_whole_or_is_not_there() {
    let memory = with_garbage();
    for keeps_unfinished in [true, false] {
        let plan = Plan { keeps_unfinished, ..GOES_ON };
        let saved = |done: bool| if done { &[3][..] } else { &[] };
        let seen = all_orders(&memory, plan, |memory, done| check_snapshots(memory, saved(done[0]), false));
        assert!(seen.len() == 2 && seen[&["ok", "ok"]] > 5 && seen[&["overtaken", "ok"]] > 5, "{seen:?}");
        let plan = Plan { works: [collect, save_again], ..plan };
        let seen = all_orders(&memory, plan, |memory, done| check_snapshots(memory, saved(done[1]), false));
        assert!(seen.len() == 2 && seen[&["ok", "ok"]] > 5 && seen[&["ok", "overtaken"]] > 5, "{seen:?}");
    }
}

/// The second one uses what the first one has stored.
#[test]
fn a_save_that_fails_takes_nothing_from_another_one() {
    let memory = with_garbage();
    for (fate, keeps_unfinished) in
        [(Fate::IsRefused, false), (Fate::IsRefused, true), (Fate::Ends, false), (Fate::Ends, true)]
    {
        let plan = Plan { works: [save_again, save_same], fate, keeps_unfinished };
        let seen = all_orders(&memory, plan, |memory, done| {
            let saved: Vec<_> = [3, 4].into_iter().zip(done).filter(|(_, done)| **done).collect();
            let saved: Vec<_> = saved.into_iter().map(|(number, _)| number).collect();
            check_snapshots(memory, &saved, fate == Fate::Ends);
        });
        assert!(seen[&["failed", "ok"]] > 5, "{seen:?}");
    }
}

/// Both copy what is live in the same packs, and delete these packs; or delete the copies of the other one.
#[test]
fn two_deletions_leave_what_is_live() {
    for fate in [Fate::GoesOn, Fate::Ends] {
        let plan = Plan { works: [collect, collect], fate, ..GOES_ON };
        let ends = fate == Fate::Ends;
        let seen = all_orders(&with_garbage(), plan, |memory, _| check_snapshots(memory, &[], ends));
        let wanted = if ends { ["failed", "ok"] } else { ["ok", "ok"] };
        assert!(seen[&wanted] > 50 && seen.keys().all(|results| results[1] == "ok"), "{seen:?}");
    }
}

/// A deletion whose machine ends in the middle, beside a save.
#[test]
fn a_deletion_that_is_not_finished_harms_no_save() {
    let plan = Plan { works: [collect, save_again], fate: Fate::Ends, ..GOES_ON };
    let seen = all_orders(&with_garbage(), plan, |memory, done| {
        check_snapshots(memory, if done[1] { &[3] } else { &[] }, true);
    });
    assert!(seen[&["failed", "ok"]] > 5, "{seen:?}");
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
