//! The report against the truth: jobs are played whose every moment is known, with the journal that the launcher would have
//! written, and with the errors of its measurements.

use super::*;
use crate::job::journal::Measured;
use proptest::prelude::*;

/// How far a class may be off, as a share of the whole time.
const TOLERANCE: f64 = 0.005;
/// The error of the time at which a killed job ended, or a hang began.
const BEAT_MS: u64 = 250;

/// Work, then a checkpoint.
#[derive(Clone, Debug)]
struct Saving {
    work_ms: u64,
    stall_us: u64,
    durable_ms: u64,
    is_in_memory: bool,
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// The job fails, and is restarted after a wait.
    Fails,
    /// The job hangs, is saved while it hangs, and is restarted.
    Hangs,
    /// The launcher is killed, and is started again after a while.
    LauncherIsKilled,
    /// The job is preempted, and is resumed after a while.
    IsPreempted,
}

#[derive(Clone, Debug)]
struct Life {
    restart_ms: u64,
    savings: Vec<Saving>,
    /// Work after the last checkpoint.
    tail_ms: u64,
    end: End,
    /// How long the end takes: the hang, or until the last snapshot is stored.
    ending_ms: u64,
    /// Until the next start begins.
    gap_ms: u64,
    /// Whether the next life begins with an older snapshot than the newest.
    steps_back: bool,
}

struct Kept {
    id: String,
    work_us: u64,
    is_in_memory: bool,
}

/// A job, what its time really went into, and its journal.
struct World {
    now_us: u64,
    truth_us: BTreeMap<Class, u64>,
    work_us: u64,
    furthest_us: u64,
    kept_us: u64,
    snapshots: Vec<Kept>,
    entries: Vec<Entry>,
    taken: u32,
}

impl World {
    fn new() -> Self {
        Self {
            now_us: 1_700_000_000_000_000,
            truth_us: BTreeMap::new(),
            work_us: 0,
            furthest_us: 0,
            kept_us: 0,
            snapshots: Vec::new(),
            entries: Vec::new(),
            taken: 0,
        }
    }

    fn now_ms(&self) -> u64 {
        self.now_us / 1000
    }

    fn pass(&mut self, class: Class, us: u64) {
        *self.truth_us.entry(class).or_default() += us;
        self.now_us += us;
    }

    fn work(&mut self, ms: u64) {
        let us = ms * 1000;
        let again = (self.furthest_us - self.work_us).min(us);
        self.pass(Class::Redone, again);
        self.pass(Class::Productive, us - again);
        self.work_us += us;
        self.furthest_us = self.furthest_us.max(self.work_us);
    }

    fn write_at(&mut self, at_ms: u64, kind: EventKind, snapshot: Option<&str>, measured: Measured) {
        let entry =
            Entry { unix_ms: at_ms, ..Entry::new(kind, "what").measured(measured).snapshot(snapshot) };
        self.entries.push(entry);
    }

    fn write(&mut self, kind: EventKind, snapshot: Option<&str>, measured: Measured) {
        self.write_at(self.now_ms(), kind, snapshot, measured);
    }

    fn start_launcher(&mut self, alive_unix_ms: Option<u64>) {
        let measured = Measured { begun_unix_ms: Some(self.now_ms()), alive_unix_ms, ..Measured::default() };
        self.write(EventKind::LauncherStarted, None, measured);
    }

    /// Starts or resumes the job, which takes a while.
    fn begin(&mut self, restart_ms: u64, steps_back: bool) {
        let measured = Measured { begun_unix_ms: Some(self.now_ms()), ..Measured::default() };
        self.pass(Class::Restart, restart_ms * 1000);
        let dropped = usize::from(steps_back && self.snapshots.len() > 1);
        self.snapshots.truncate(self.snapshots.len() - dropped);
        let from = self.snapshots.last().map(|kept| (kept.id.clone(), kept.work_us));
        let kind = if from.is_some() { EventKind::Resumed } else { EventKind::Started };
        self.write(kind, from.as_ref().map(|(id, _)| &id[..]), measured);
        self.work_us = from.map_or(0, |(_, work_us)| work_us);
        self.kept_us += self.work_us;
    }

    /// A checkpoint: the job is paused. Returns its snapshot, which is durable only later.
    fn pause(&mut self, class: Class, stall_us: u64) -> (String, Measured) {
        // The agents of every other one attach after it was taken.
        let attach_us = if self.taken.is_multiple_of(2) { stall_us / 2 } else { 0 };
        self.pass(class, stall_us - attach_us);
        self.taken += 1;
        let phases = StallPhases { dump_us: stall_us - attach_us, attach_us, ..StallPhases::default() };
        let measured = Measured {
            taken_unix_ms: Some(self.now_ms()),
            stall_us: Some(stall_us),
            stall_phases: Some(phases),
            ..Measured::default()
        };
        self.pass(class, attach_us);
        (format!("{:06}", self.taken), measured)
    }

    fn save(&mut self, saving: &Saving) {
        self.work(saving.work_ms);
        let (id, measured) = self.pause(Class::Stall, saving.stall_us);
        let kind = if saving.is_in_memory { EventKind::InMemory } else { EventKind::Saved };
        self.write_at(self.now_ms() + saving.durable_ms, kind, Some(&id), measured);
        self.snapshots.push(Kept { id, work_us: self.work_us, is_in_memory: saving.is_in_memory });
    }

    /// A life of the job. Returns what is known of its end if its launcher was killed.
    fn live(&mut self, life: &Life) -> Option<u64> {
        life.savings.iter().for_each(|saving| self.save(saving));
        self.work(life.tail_ms);
        let ended = |at_ms| Measured { ended_unix_ms: Some(at_ms), ..Measured::default() };
        match life.end {
            End::Fails => {
                let measured = ended(self.now_ms());
                self.write(EventKind::Failed, None, measured);
                self.pass(Class::Waiting, life.gap_ms * 1000);
                None
            }
            End::Hangs => {
                let begun_ms = self.now_ms() - BEAT_MS;
                self.pass(Class::Hang, life.ending_ms * 500);
                let (id, measured) = self.pause(Class::Hang, 90_000);
                self.write(EventKind::Saved, Some(&id), measured);
                self.pass(Class::Hang, life.ending_ms * 500);
                let measured = Measured { begun_unix_ms: Some(begun_ms), ..ended(self.now_ms()) };
                self.write(EventKind::Failed, None, measured);
                self.pass(Class::Waiting, life.gap_ms * 1000);
                None
            }
            End::LauncherIsKilled => {
                let alive_ms = self.now_ms() + BEAT_MS;
                self.pass(Class::Away, life.gap_ms * 1000);
                self.snapshots.retain(|kept| !kept.is_in_memory);
                Some(alive_ms)
            }
            End::IsPreempted => {
                self.write(EventKind::Preempted, None, Measured::default());
                let (id, measured) = self.pause(Class::Stall, 150_000);
                let ended_ms = self.now_ms();
                self.snapshots.push(Kept { id: id.clone(), work_us: self.work_us, is_in_memory: false });
                self.pass(Class::Stall, life.ending_ms * 1000);
                self.write(EventKind::Saved, Some(&id), measured);
                self.write(EventKind::Ended, Some(&id), ended(ended_ms));
                self.write(EventKind::LauncherEnded, None, Measured::default());
                self.pass(Class::Away, life.gap_ms * 1000);
                None
            }
        }
    }

    /// All lives of a job, the last of which is still under way.
    fn of(lives: &[Life]) -> Self {
        let mut world = Self::new();
        world.start_launcher(None);
        let mut steps_back = false;
        for life in lives {
            world.begin(life.restart_ms, steps_back);
            let alive_ms = world.live(life);
            if matches!(life.end, End::LauncherIsKilled | End::IsPreempted) {
                world.start_launcher(alive_ms);
            }
            steps_back = life.steps_back;
        }
        world.begin(700, false);
        world.work(60_000);
        world
    }
}

fn saving() -> impl Strategy<Value = Saving> {
    (1000..400_000_u64, 200..2_000_000_u64, 10..20_000_u64, any::<bool>()).prop_map(
        |(work_ms, stall_us, durable_ms, is_in_memory)| Saving {
            work_ms,
            stall_us,
            durable_ms,
            is_in_memory,
        },
    )
}

fn life() -> impl Strategy<Value = Life> {
    let ends = prop::sample::select(vec![End::Fails, End::Hangs, End::LauncherIsKilled, End::IsPreempted]);
    // A snapshot is durable before the job ends: the pause of one that is lost with its launcher is in no journal.
    let tail_ms = 80_000..500_000_u64;
    let times = (200..40_000_u64, 2000..700_000_u64, 0..900_000_u64);
    (times, prop::collection::vec(saving(), 0..6), tail_ms, ends, any::<bool>()).prop_map(
        |((restart_ms, ending_ms, gap_ms), savings, tail_ms, end, steps_back)| Life {
            restart_ms,
            savings,
            tail_ms,
            end,
            ending_ms,
            gap_ms,
            steps_back,
        },
    )
}

proptest! {
    /// Each class is within half a percent of the truth, of the whole time.
    #[test]
    fn every_class_is_as_it_was(lives in prop::collection::vec(life(), 0..8)) {
        let world = World::of(&lives);
        let mut entries = world.entries.clone();
        entries.sort_by_key(|entry| entry.unix_ms);
        let live = Live { now_unix_ms: world.now_ms(), is_running: true, ..Live::default() };
        let found = times(&entries, live).unwrap();
        let whole_ms = world.truth_us.values().sum::<u64>() as f64 / 1000.0;
        let is_near = |found_ms: u64, true_us: u64| {
            (found_ms as f64 - true_us as f64 / 1000.0).abs() <= TOLERANCE * whole_ms
        };
        for class in Class::ALL {
            let truth_us = world.truth_us.get(&class).copied().unwrap_or(0);
            prop_assert!(
                is_near(found.of(class), truth_us),
                "{:?}: {} ms instead of {} us of {} ms\n{:?}", class, found.of(class), truth_us, whole_ms, lives
            );
        }
        prop_assert!(is_near(found.whole_ms(), world.truth_us.values().sum()));
        prop_assert!(is_near(found.kept_ms, world.kept_us), "{} ms, {} us", found.kept_ms, world.kept_us);
    }
}
