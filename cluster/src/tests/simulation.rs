//! Clusters of 2 to 64 nodes: some minutes with faults, then good ones, in which the job has to get on.

use std::time::Duration;

use super::world::{Flaw, World};
use crate::Settings;

/// Seeds of one test run; `CKPT_TEST_SEEDS` sets another number, and `CKPT_TEST_SEED` the first one.
const SEEDS: u64 = 1000;

const SECOND: Duration = Duration::from_secs(1);

fn settings(random: &mut fastrand::Rng) -> Settings {
    let parts = match random.u32(..20) {
        0..12 => random.u32(2..5),
        12..19 => random.u32(5..17),
        _ => random.u32(17..65),
    };
    let spares = if parts < 63 { random.u32(..3) } else { 0 };
    Settings {
        nodes: parts + spares,
        parts,
        beat: SECOND,
        silence: SECOND * 4,
        stagger: SECOND * 3,
        repeat: Duration::from_millis(300),
        gather: SECOND * 2,
        lease: SECOND * 10,
        load_lease: SECOND * 20,
        step_limit: SECOND * 4,
        transfer_limit: SECOND * 12,
        tries: 2,
    }
}

/// What has happened.
#[derive(Debug, Default)]
struct Outcome {
    nodes: u32,
    committed_in_chaos: u64,
    resumed: u64,
    ended: u64,
}

/// Runs one simulation. The error is a violation.
fn simulate(seed: u64, flaw: Option<Flaw>) -> Result<Outcome, String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let settings = settings(&mut random);
    let mut world = World::new(settings, random.u64(..), flaw);
    let chaos = SECOND * random.u32(60..180);
    world.run(chaos, |_| false)?;
    let committed_in_chaos = world.ground.committed;
    world.heal();
    progress(&mut world, "after the faults", None)?;
    // A machine dies. With a spare, it does not come back.
    let session = world.running().expect("a session runs");
    let lost = world.machine_of(session);
    world.crash(lost)?;
    if settings.nodes == settings.parts {
        world.restart(lost, SECOND);
    }
    progress(&mut world, "after the death of a machine", Some(session))?;
    world.ground.check_parts()?;
    let (resumed, ended) = (world.resumed, world.ended);
    Ok(Outcome { nodes: settings.nodes, committed_in_chaos, resumed, ended })
}

/// A session later than `than` runs, and a snapshot is committed.
fn progress(world: &mut World, when: &str, than: Option<crate::AttemptId>) -> Result<(), String> {
    let limit = world.now + SECOND * 180;
    let is_running = |world: &World| world.running() > than;
    if !world.run(limit, is_running)? {
        return Err(format!("no session runs {when}\n{}", world.describe()));
    }
    let (committed, limit) = (world.ground.committed, world.now + SECOND * 120);
    let is_saved = |world: &World| world.ground.committed > committed && world.running() > than;
    if !world.run(limit, is_saved)? {
        return Err(format!("no snapshot is committed {when}\n{}", world.describe()));
    }
    Ok(())
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn clusters_with_faults() {
    let first = number("CKPT_TEST_SEED", 0);
    let end = first + number("CKPT_TEST_SEEDS", SEEDS);
    let mut total = Outcome::default();
    for seed in first..end {
        let outcome = simulate(seed, None).unwrap_or_else(|error| {
            panic!("CKPT_TEST_SEED={seed} CKPT_TEST_SEEDS=1: {error}");
        });
        total.nodes = total.nodes.max(outcome.nodes);
        total.committed_in_chaos += outcome.committed_in_chaos;
        total.resumed += outcome.resumed;
        total.ended += outcome.ended;
    }
    println!("{} seeds: {total:?}", end - first);
    let seeds = end - first;
    let is_enough = total.committed_in_chaos > seeds && total.resumed > 3 * seeds && total.ended > seeds;
    assert!(seeds < 100 || is_enough, "{total:?}");
}

/// The simulation finds this violation with a flaw.
#[track_caller]
fn finds(flaw: Flaw, violation: &str) {
    let mut found = (0..2000).filter_map(|seed| simulate(seed, Some(flaw)).err());
    assert!(found.any(|found| found.contains(violation)), "the flaw is not found");
}

#[test]
fn the_simulation_finds_a_missing_lease() {
    finds(Flaw::NoLease, "frozen beyond its lease");
}

#[test]
fn the_simulation_finds_a_commit_of_a_stale_epoch() {
    finds(Flaw::NoEpoch, "stale");
}

#[test]
fn the_simulation_finds_a_release_before_the_second_barrier() {
    finds(Flaw::NoSecondBarrier, "torn");
}

#[test]
fn the_simulation_finds_a_packet_rule_that_is_removed_before_all_have_captured() {
    finds(Flaw::EarlyUnblock, "torn");
}

#[test]
fn the_simulation_finds_reports_of_another_attempt() {
    finds(Flaw::AnyAttempt, "torn");
}

#[test]
fn the_simulation_finds_a_part_that_runs_before_all_are_restored() {
    finds(Flaw::NoLoadBarrier, "before all are restored");
}

#[test]
fn the_simulation_finds_the_collection_of_parts_that_are_still_to_be_committed() {
    finds(Flaw::EagerGarbage, "lost");
}
