//! The multicast objects of a job, from their way off the devices in one attempt to their return.
//!
//! Their processes, the members, take each step together. All numbers of processes are those in the job, which stay the same
//! in a job that is resumed.

use std::collections::{BTreeMap, BTreeSet};

use ckpt_protocol::agent::{Cycle as Named, CycleStep, MulticastObject, Progress, ShareKey};

/// What to do about objects that NCCL has made.
const OF_NCCL: &str = "if it is NCCL's, run the job with ckpt-run --nccl p2p (NCCL_NVLS_ENABLE=0)";

/// A cycle.
#[derive(Debug)]
pub(super) struct Cycle {
    named: Named,
    /// Members that have ended, or that run another program.
    ended: BTreeSet<u32>,
    down: BTreeSet<u32>,
    added: BTreeSet<u32>,
    bound: BTreeSet<u32>,
    /// All members were down, so that the objects have ended.
    is_down: bool,
    /// The attempt has failed before that.
    has_failed: bool,
}

impl Cycle {
    /// A cycle in which the objects are on the devices.
    pub fn new(id: u64, members: BTreeSet<u32>) -> Self {
        Self::of(Named { id, members: members.into_iter().collect() }, false)
    }

    /// The cycle of a job that is resumed: its objects were down in the snapshot.
    pub fn of_snapshot(named: Named) -> Self {
        Self::of(named, true)
    }

    fn of(named: Named, is_down: bool) -> Self {
        let empty = BTreeSet::new;
        Self {
            named,
            ended: empty(),
            down: empty(),
            added: empty(),
            bound: empty(),
            is_down,
            has_failed: false,
        }
    }

    /// Its name.
    pub fn named(&self) -> &Named {
        &self.named
    }

    /// Whether a process is a member.
    pub fn has(&self, pid: u32) -> bool {
        self.named.members.contains(&pid)
    }

    /// Notes that a member has come to a step. Returns whether the objects have ended with that.
    pub fn arrive(&mut self, pid: u32, step: CycleStep) -> bool {
        let arrived = match step {
            CycleStep::Down => &mut self.down,
            CycleStep::Added => &mut self.added,
            CycleStep::Bound => &mut self.bound,
        };
        arrived.insert(pid);
        let ends = !self.is_down && !self.has_failed && self.are_all(&self.down);
        self.is_down |= ends;
        ends
    }

    /// Notes that a process has ended.
    pub fn note_end(&mut self, pid: u32) {
        if self.has(pid) {
            self.ended.insert(pid);
            self.fail();
        }
    }

    /// The attempt has failed: members that are down come back. Where all are, it is too late for that.
    pub fn fail(&mut self) {
        self.has_failed |= !self.is_down;
    }

    /// Whether all members have come to a step. Without its process, an object that has ended is not complete. One that lives
    /// is as it would be without the attempt.
    pub fn progress(&self, step: CycleStep) -> Progress {
        let is_complete = match step {
            CycleStep::Down if self.has_failed => return Progress::Failed,
            CycleStep::Down => self.is_down,
            CycleStep::Added if !self.ended.is_empty() => return Progress::Failed,
            CycleStep::Added => self.are_all(&self.added),
            CycleStep::Bound => {
                let mut members = self.named.members.iter();
                members.all(|pid| self.bound.contains(pid) || self.ended.contains(pid))
            }
        };
        if is_complete { Progress::Complete } else { Progress::Pending }
    }

    fn are_all(&self, arrived: &BTreeSet<u32>) -> bool {
        self.named.members.iter().all(|pid| arrived.contains(pid))
    }
}

/// What the processes say of the objects that they share, by their IDs.
#[derive(Default)]
pub(super) struct Objects(BTreeMap<u32, Vec<MulticastObject>>);

impl Objects {
    /// Notes what a process says.
    pub fn note(&mut self, pid: u32, objects: &[MulticastObject]) {
        if !objects.is_empty() {
            self.0.insert(pid, objects.to_vec());
        }
    }

    /// The processes that have objects.
    pub fn members(&self) -> BTreeSet<u32> {
        self.0.keys().copied().collect()
    }

    /// Why an object could not be brought back; `None` if each can.
    pub fn problem(&self) -> Option<String> {
        let mut sums: BTreeMap<ShareKey, (u32, Option<u32>, bool)> = BTreeMap::new();
        for object in self.0.values().flatten() {
            let (devices, team_size, is_used) = sums.entry(object.key).or_default();
            *devices = devices.saturating_add(object.devices);
            *team_size = team_size.or(object.team_size);
            *is_used |= object.is_used;
        }
        sums.into_values().find_map(|(devices, team_size, is_used)| match team_size {
            None => Some(format!(
                "it has imported a multicast object (cuMulticastCreate) of a process that has released it or ended; \
                 {OF_NCCL}"
            )),
            Some(size) if is_used && devices != size => Some(format!(
                "processes that have added devices to a multicast object (cuMulticastAddDevice) have released it: \
                 {devices} of its {size} devices are known; {OF_NCCL}"
            )),
            Some(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ShareKey = ShareKey(7);

    fn cycle() -> Cycle {
        Cycle::new(9, BTreeSet::from([1, 2]))
    }

    #[test]
    fn objects_end_when_all_members_are_down() {
        let mut cycle = cycle();
        assert!(!cycle.arrive(1, CycleStep::Down));
        assert_eq!(cycle.progress(CycleStep::Down), Progress::Pending);
        assert!(cycle.arrive(2, CycleStep::Down));
        assert!(!cycle.arrive(2, CycleStep::Down), "they have ended before");
        cycle.fail();
        assert_eq!(cycle.progress(CycleStep::Down), Progress::Complete, "it is too late");
        for step in [CycleStep::Added, CycleStep::Bound] {
            cycle.arrive(2, step);
            assert_eq!(cycle.progress(step), Progress::Pending);
            cycle.arrive(1, step);
            assert_eq!(cycle.progress(step), Progress::Complete);
        }
    }

    #[test]
    fn after_a_failure_objects_live_on() {
        let mut cycle = cycle();
        cycle.arrive(1, CycleStep::Down);
        cycle.fail();
        assert_eq!(cycle.progress(CycleStep::Down), Progress::Failed);
        assert!(!cycle.arrive(2, CycleStep::Down));
        assert_eq!(cycle.progress(CycleStep::Down), Progress::Failed, "the first has turned back");
        cycle.arrive(1, CycleStep::Bound);
        assert_eq!(cycle.progress(CycleStep::Bound), Progress::Pending);
        cycle.note_end(2);
        assert_eq!(cycle.progress(CycleStep::Bound), Progress::Complete, "it has nothing to bind");
    }

    #[test]
    fn a_process_that_ends_is_missed_where_objects_are_made_again() {
        let mut cycle = Cycle::of_snapshot(Named { id: 3, members: vec![1, 2] });
        cycle.arrive(1, CycleStep::Added);
        assert_eq!(cycle.progress(CycleStep::Added), Progress::Pending);
        cycle.note_end(3);
        assert_eq!(cycle.progress(CycleStep::Added), Progress::Pending, "it is no member");
        cycle.note_end(2);
        assert_eq!(cycle.progress(CycleStep::Added), Progress::Failed);
        let mut early = self::cycle();
        early.note_end(1);
        early.arrive(2, CycleStep::Down);
        assert_eq!(early.progress(CycleStep::Down), Progress::Failed);
    }

    #[test]
    fn an_object_is_brought_back_only_with_all_its_devices() {
        let object = |devices, team_size, is_used| MulticastObject { key: KEY, devices, team_size, is_used };
        let problem = |owner: MulticastObject, importer: Option<MulticastObject>| {
            let mut objects = Objects::default();
            objects.note(1, &[owner]);
            objects.note(2, importer.as_slice());
            objects.problem()
        };
        assert_eq!(problem(object(1, Some(2), true), Some(object(1, None, true))), None);
        assert_eq!(problem(object(0, Some(2), false), Some(object(1, None, false))), None, "it grows");
        let found = problem(object(1, Some(2), true), None).expect("a device is missing");
        assert!(found.contains("1 of its 2 devices"), "{found}");
        let found = problem(object(1, None, true), Some(object(1, None, true))).expect("no owner");
        assert!(found.contains("has released it or ended"), "{found}");
    }
}
