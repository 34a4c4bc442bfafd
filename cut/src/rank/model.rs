//! Every way in which the threads of one rank can run with up to three preemptions, and every value that the memory model
//! lets them read: loom runs the code of `clock.rs`.

mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
}

#[allow(dead_code, clippy::duplicate_mod, reason = "the model runs a part of it, with other types of `sync`")]
#[path = "clock.rs"]
mod clock;

use std::sync::Arc as StdArc;

use loom::sync::Arc;
use loom::thread;

use crate::{Member, Name, Order, Report, Role};
use clock::{Clock, Entry};

fn member(communicator: u128) -> Member {
    Member { communicator: Name(communicator), index: 0 }
}

fn reach(version: u64, targets: &[(u128, u64)]) -> Order {
    let targets = targets.iter().map(|(name, target)| (member(*name), *target)).collect();
    Order::Reach { attempt: 1, version, targets, is_open: false }
}

struct Rank {
    clock: Clock,
    entries: Vec<StdArc<Entry>>,
}

impl Rank {
    fn new(communicators: u128) -> Arc<Self> {
        let clock = Clock::new(&["step"], || ());
        let role = Role::Communicator { awaits: None, alias: None };
        let entries = (0..communicators).map(|name| clock.register(member(name), role)).collect();
        Arc::new(Self { clock, entries })
    }

    /// The report, after waiting until no step is in progress. The agent polls, as here.
    fn idle_report(&self) -> Report {
        loop {
            let report = self.clock.report().expect("a cut is wanted");
            if report.in_call == 0 {
                return report;
            }
            thread::yield_now();
        }
    }
}

fn sequences(report: &Report) -> Vec<u64> {
    report.members.iter().map(|member| member.sequence).collect()
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// A rank that has reported that it stands at its targets begins no step until it gets new ones, and what it has begun
/// is in the report. Nobody sleeps for ever: loom reports that as a deadlock.
fn stands_still(threads: usize, steps: u32) {
    check(move || {
        let rank = Rank::new(1);
        let steppers: Vec<_> = (0..threads)
            .map(|_| {
                let rank = Arc::clone(&rank);
                thread::spawn(move || {
                    (0..steps).for_each(|_| drop(rank.clock.begin(&[(&*rank.entries[0], 1)], 0)));
                })
            })
            .collect();
        rank.clock.follow(Order::Count { attempt: 1 });
        let begun = sequences(&rank.idle_report());
        rank.clock.follow(reach(1, &[(0, begun[0])]));
        let report = rank.idle_report();
        assert_eq!(report.version, 1);
        assert_eq!(sequences(&report), begun, "a step began although the targets were met");
        assert_eq!(rank.entries[0].sequence(), begun[0]);
        rank.clock.follow(Order::Release);
        steppers.into_iter().for_each(|stepper| stepper.join().expect("a stepper"));
        assert_eq!(rank.entries[0].sequence(), threads as u64 * u64::from(steps));
    });
}

#[test]
fn a_rank_at_its_targets_begins_nothing() {
    stands_still(1, 2);
    stands_still(2, 1);
}

/// The rank has to take one step more on the second communicator: it goes on to it past the target of the first.
#[test]
fn a_rank_runs_on_until_its_targets_are_met() {
    check(|| {
        let rank = Rank::new(2);
        let stepper = {
            let rank = Arc::clone(&rank);
            thread::spawn(move || {
                for entry in [0, 1, 0] {
                    drop(rank.clock.begin(&[(&*rank.entries[entry], 1)], 0));
                }
            })
        };
        rank.clock.follow(Order::Count { attempt: 1 });
        let begun = sequences(&rank.idle_report());
        rank.clock.follow(reach(1, &[(0, begun[0]), (1, 1)]));
        let mut report = rank.idle_report();
        while report.members[1].sequence < 1 {
            thread::yield_now();
            report = rank.idle_report();
        }
        // The third step comes after the second communicator's only one: it was begun before the cut was wanted, or not
        // at all.
        assert_eq!(sequences(&report), [begun[0].max(1), 1]);
        assert_eq!(rank.clock.report().map(|report| sequences(&report)), Some(sequences(&report)));
        rank.clock.follow(Order::Release);
        stepper.join().expect("the stepper");
        assert_eq!([rank.entries[0].sequence(), rank.entries[1].sequence()], [2, 1]);
    });
}

/// A communicator of a rank that stands at its targets is aborted, by another thread than the one that is parked: that
/// begins no step on another one.
#[test]
fn a_rank_that_leaves_a_communicator_begins_nothing() {
    check(|| {
        let rank = Rank::new(2);
        drop(rank.clock.begin(&[(&*rank.entries[0], 1)], 0));
        rank.clock.follow(Order::Count { attempt: 1 });
        rank.clock.follow(reach(1, &[(0, 1)]));
        let stepper = {
            let rank = Arc::clone(&rank);
            thread::spawn(move || drop(rank.clock.begin(&[(&*rank.entries[1], 1)], 0)))
        };
        rank.clock.retire(&rank.entries[0]);
        assert_eq!(sequences(&rank.idle_report()), [0], "a step began although the targets were met");
        rank.clock.follow(Order::Release);
        stepper.join().expect("the stepper");
        assert_eq!(rank.entries[1].sequence(), 1);
    });
}

/// In a report without a step in progress, a step over two communicators is there on both or on none.
#[test]
fn a_group_is_one_step() {
    check(|| {
        let rank = Rank::new(2);
        let stepper = {
            let rank = Arc::clone(&rank);
            thread::spawn(move || {
                drop(rank.clock.begin(&[(&*rank.entries[0], 1), (&*rank.entries[1], 2)], 0));
            })
        };
        rank.clock.follow(Order::Count { attempt: 1 });
        let begun = sequences(&rank.idle_report());
        assert!(begun == [0, 0] || begun == [1, 2], "{begun:?}");
        rank.clock.follow(Order::Release);
        stepper.join().expect("the stepper");
    });
}

/// Between a report and the targets, a step that other ranks wait for is let through by the next version.
#[test]
fn a_raised_target_wakes_a_parked_step() {
    check(|| {
        let rank = Rank::new(1);
        let stepper = {
            let rank = Arc::clone(&rank);
            thread::spawn(move || drop(rank.clock.begin(&[(&*rank.entries[0], 1)], 0)))
        };
        rank.clock.follow(Order::Count { attempt: 1 });
        rank.clock.follow(reach(1, &[]));
        rank.clock.follow(reach(2, &[(0, 1)]));
        stepper.join().expect("the stepper");
        let report = rank.idle_report();
        assert_eq!((report.version, report.in_call, sequences(&report)), (2, 0, vec![1]));
    });
}
