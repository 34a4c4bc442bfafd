//! Random programs under random schedules.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::program::{Kinds, On, Operation, Program, What, of_operations, programs};
use super::simulation::{Flaw, Killed, Outcome, Run, simulate};
use crate::{Blocker, RankId};

const WITH_CHANGES: Kinds = Kinds { changes: true, waits: false };

fn run(seed: u64) -> Run {
    Run { seed, checkpoints: 3, expires: false, prelude: 0, killed: None, flaw: None }
}

/// Runs so many random programs.
fn check(
    cases: u32,
    kinds: Kinds,
    most: usize,
    mut test: impl FnMut(&Program, u64) -> Result<(), String>,
) -> Result<(), String> {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    let test = std::cell::RefCell::new(&mut test);
    TestRunner::new(config)
        .run(&(programs(kinds, most), any::<u64>()), |(program, seed)| {
            (test.borrow_mut())(&program, seed).map_err(TestCaseError::fail)
        })
        .map_err(|error| error.to_string())
}

/// Every attempt without waits on the host reaches a cut, every cut is consistent, and the program ends.
fn always_cuts(prelude: usize) -> impl FnMut(&Program, u64) -> Result<(), String> {
    move |program, seed| {
        let outcome = simulate(program, Run { prelude, ..run(seed) })?;
        let is_as_expected = (outcome.cuts, outcome.stuck, outcome.failures.len()) == (3, 0, 0);
        if is_as_expected { Ok(()) } else { Err(format!("{outcome:?}")) }
    }
}

#[test]
fn a_program_without_waits_on_the_host_is_always_cut() {
    check(10_000, WITH_CHANGES, 4, always_cuts(0)).unwrap();
    check(1_000, WITH_CHANGES, 16, always_cuts(0)).unwrap();
}

/// The prelude creates all communicators: nothing but what had to be begun is.
#[test]
fn no_step_is_begun_that_is_not_needed_for_the_cut() {
    let kinds = Kinds { changes: false, waits: false };
    check(10_000, kinds, 4, always_cuts(4)).unwrap();
    check(1_000, kinds, 16, always_cuts(4)).unwrap();
}

/// A rank that waits on the host for a parked one ends the attempt; the program ends, and what was cut is consistent.
#[test]
fn a_wait_on_the_host_costs_an_attempt_and_not_the_program() {
    let kinds = Kinds { changes: true, waits: true };
    let mut total = Outcome::default();
    check(10_000, kinds, 6, |program, seed| {
        let outcome = simulate(program, run(seed))?;
        total.cuts += outcome.cuts;
        total.stuck += outcome.stuck;
        let is_over = outcome.cuts as usize + outcome.failures.len() == 3;
        if is_over { Ok(()) } else { Err(format!("{outcome:?}")) }
    })
    .unwrap();
    assert!(total.cuts > 0 && total.stuck > 0, "{total:?}");
}

/// Rank 1 waits on the host for rank 0, again and again, and rank 2 is ahead of both. Where all attempts of a request
/// find it so, the failure says that rank 1 is behind. The program ends.
#[test]
fn a_job_that_is_not_cut_runs_on_and_the_rank_behind_is_named() {
    let operation = |what, ranks: &[usize]| Operation { what, ranks: ranks.to_vec() };
    let on = |communicator| What::Enqueue(vec![(On::Communicator(communicator), 1)]);
    let mut operations = vec![operation(What::Create(0), &[0]), operation(What::Create(1), &[1, 2])];
    for _ in 0..30 {
        operations.extend([
            operation(on(0), &[0]),
            operation(What::Wait, &[0, 1]),
            operation(on(1), &[1, 2]),
        ]);
    }
    let program = of_operations(operations, vec![vec![0], vec![1, 2]]);
    let outcomes = (0..1000).map(|seed| simulate(&program, run(seed)).unwrap());
    let failures: Vec<_> = outcomes.flat_map(|outcome| outcome.failures).collect();
    assert!(!failures.is_empty());
    for failure in failures {
        let is_named = |blocker: &Blocker| matches!(blocker, Blocker::Behind { rank: RankId(1), .. });
        assert!(failure.attempts == 3 && failure.blockers.iter().all(is_named), "{failure}");
    }
}

#[test]
fn an_attempt_may_end_at_any_time() {
    let kinds = Kinds { changes: true, waits: true };
    check(5_000, kinds, 8, |program, seed| simulate(program, Run { expires: true, ..run(seed) }).map(|_| ()))
        .unwrap();
}

/// The others are cut or go on without a cut, and get as far as without checkpoints.
#[test]
fn a_killed_rank_keeps_the_others_from_nothing_that_they_could_do_without_checkpoints() {
    let mut total = Outcome::default();
    check(10_000, WITH_CHANGES, 6, |program, seed| {
        let rank = seed as usize % program.of_rank.len();
        let after = (seed >> 32) as usize % (2 * program.of_rank[rank].len() + 1);
        let killed = Some(Killed { rank, after });
        let outcome = simulate(program, Run { killed, ..run(seed) })?;
        let without = simulate(program, Run { killed, checkpoints: 0, ..run(seed) })?;
        total.cuts += outcome.cuts;
        let is_over = outcome.cuts as usize + outcome.failures.len() == 3;
        total.failures.extend(outcome.failures.iter().cloned());
        if is_over && outcome.progress == without.progress {
            Ok(())
        } else {
            Err(format!("{outcome:?}, without checkpoints {without:?}"))
        }
    })
    .unwrap();
    assert!(total.cuts > 0 && !total.failures.is_empty(), "{total:?}");
}

/// The error that random programs find with a flaw, if they find one.
fn found(flaw: Flaw) -> String {
    let found = check(10_000, WITH_CHANGES, 4, |program, seed| {
        let outcome = simulate(program, Run { flaw: Some(flaw), ..run(seed) })?;
        if outcome.stuck == 0 { Ok(()) } else { Err("stuck".to_owned()) }
    });
    found.expect_err("the flaw is not found")
}

#[test]
fn the_simulation_finds_a_missing_target_raise() {
    let found = found(Flaw::NoRaise);
    assert!(found.contains("stuck"), "{found}");
}

#[test]
fn the_simulation_finds_a_missing_mark() {
    let found = found(Flaw::NoMark);
    assert!(found.contains("in a call at the cut"), "{found}");
}

#[test]
fn the_simulation_finds_a_group_that_is_not_atomic() {
    let found = found(Flaw::SplitGroup);
    assert!(
        found.contains("only at the cut") || found.contains("stuck") || found.contains("step"),
        "{found}"
    );
}

#[test]
fn the_simulation_finds_an_acknowledgement_of_older_targets() {
    let found = found(Flaw::OldVersion);
    assert!(found.contains("at the cut"), "{found}");
}

#[test]
fn the_simulation_finds_a_launcher_that_does_not_know_all_processes() {
    let found = found(Flaw::NotClosed);
    assert!(found.contains("at the cut") || found.contains("stuck"), "{found}");
}
