//! The heap against a model that knows every grain by itself.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const STREAMS: u64 = 3;
const SEGMENT_GRAINS: u64 = 16;
/// Two segments without a gap and one by itself.
const SEGMENTS: [u64; 3] = [0x10_0000, 0x10_0000 + SEGMENT_GRAINS * GRAIN_BYTES, 0x20_0000];

/// What the model knows of a grain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grain {
    Used { start: u64 },
    Free,
    Freed { stream: StreamId, moment: Moment },
}

#[derive(Clone, Debug)]
enum Step {
    Take {
        bytes: u64,
        stream: StreamId,
    },
    /// The allocation of that number among the living ones.
    Free {
        which: usize,
        stream: Option<StreamId>,
    },
    Settle {
        stream: StreamId,
        back: Moment,
    },
    Run {
        bytes: u64,
        stream: StreamId,
    },
    Trim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = || 1..=(SEGMENT_GRAINS + 1) * GRAIN_BYTES;
    let small = || 1..=4 * GRAIN_BYTES;
    let stream = || 1..=STREAMS;
    let step = prop_oneof![
        4 => (small(), stream()).prop_map(|(bytes, stream)| Step::Take { bytes, stream }),
        1 => (bytes(), stream()).prop_map(|(bytes, stream)| Step::Take { bytes, stream }),
        5 => (any::<usize>(), prop::option::weighted(0.8, stream()))
            .prop_map(|(which, stream)| Step::Free { which, stream }),
        2 => (stream(), 0..6_u64).prop_map(|(stream, back)| Step::Settle { stream, back }),
        1 => (bytes(), stream()).prop_map(|(bytes, stream)| Step::Run { bytes, stream }),
        1 => Just(Step::Trim),
    ];
    prop::collection::vec(step, 1..120)
}

struct Model {
    heap: Heap,
    grains: BTreeMap<u64, Grain>,
    /// What was asked for, by start.
    living: BTreeMap<u64, u64>,
    moment: Moment,
}

impl Model {
    fn new() -> Self {
        let mut model =
            Self { heap: Heap::default(), grains: BTreeMap::new(), living: BTreeMap::new(), moment: 0 };
        for segment in SEGMENTS {
            model.add(segment);
        }
        model
    }

    fn add(&mut self, segment: u64) {
        self.heap.add_segment(segment, SEGMENT_GRAINS * GRAIN_BYTES);
        for grain in 0..SEGMENT_GRAINS {
            self.grains.insert(segment + grain * GRAIN_BYTES, Grain::Free);
        }
    }

    fn grains_of(start: u64, bytes: u64) -> impl Iterator<Item = u64> {
        let count = bytes.div_ceil(GRAIN_BYTES);
        (0..count).map(move |grain| start + grain * GRAIN_BYTES)
    }

    /// The longest run of grains in one segment that are alike to `is`, in bytes.
    fn longest(&self, is: impl Fn(Grain) -> bool) -> u64 {
        let runs = SEGMENTS.iter().map(|segment| {
            let mut best = (0, 0);
            for at in Self::grains_of(*segment, SEGMENT_GRAINS * GRAIN_BYTES) {
                let is_like = self.grains.get(&at).is_some_and(|grain| is(*grain));
                best.1 = if is_like { best.1 + 1 } else { 0 };
                best.0 = best.1.max(best.0);
            }
            best.0
        });
        runs.max().unwrap_or(0) * GRAIN_BYTES
    }

    /// Notes an allocation; every grain of it must be one that the stream may have.
    fn taken(&mut self, start: u64, bytes: u64, may_have: impl Fn(Grain) -> bool) {
        assert_eq!(start % GRAIN_BYTES, 0);
        let segment = SEGMENTS.iter().filter(|segment| **segment <= start).max().expect("in a segment");
        assert!(start + bytes <= segment + SEGMENT_GRAINS * GRAIN_BYTES, "it ends in its segment");
        for at in Self::grains_of(start, bytes) {
            let before = self.grains.insert(at, Grain::Used { start }).expect("memory of the pool");
            assert!(may_have(before), "{before:?} was handed out");
        }
        self.living.insert(start, bytes);
    }

    fn take(&mut self, bytes: u64, stream: StreamId) {
        let settled = self.longest(|grain| grain == Grain::Free);
        let own =
            self.longest(|grain| matches!(grain, Grain::Freed { stream: other, .. } if other == stream));
        match self.heap.take(bytes, stream) {
            Some(start) => self.taken(start, bytes, |grain| match grain {
                Grain::Free => true,
                Grain::Freed { stream: other, .. } => other == stream,
                Grain::Used { .. } => false,
            }),
            None => assert!(settled.max(own) < bytes, "there was room for {bytes} bytes"),
        }
    }

    fn free(&mut self, which: usize, stream: Option<StreamId>) {
        let Some((&start, &bytes)) = self.living.iter().nth(which % self.living.len().max(1)) else { return };
        self.moment += 1;
        let moment = self.moment;
        assert!(self.heap.free(start, stream.map(|stream| (stream, moment))));
        assert!(!self.heap.free(start, None), "it is freed once");
        self.living.remove(&start);
        let grain = stream.map_or(Grain::Free, |stream| Grain::Freed { stream, moment });
        for at in Self::grains_of(start, bytes) {
            self.grains.insert(at, grain);
        }
    }

    /// What was settled must be free for everybody by now, unless it waits with a later neighbour of its stream: so
    /// the model takes over what the heap has, after it has checked that this is no more than may be.
    fn settle(&mut self, stream: StreamId, back: Moment) {
        let until = self.moment.saturating_sub(back);
        self.heap.settle(stream, until);
        for (start, block) in &self.heap.blocks {
            for at in Self::grains_of(*start, block.bytes) {
                let grain = self.grains.get_mut(&at).expect("memory of the pool");
                let is_due = |moment: Moment, of: StreamId| of == stream && moment <= until;
                match (*grain, block.state) {
                    (Grain::Freed { stream, moment }, State::Free) => {
                        assert!(is_due(moment, stream), "too early for {stream} at {moment}");
                        *grain = Grain::Free;
                    }
                    (Grain::Freed { stream, moment }, State::Freed { moment: joined, .. }) => {
                        assert!(!is_due(joined, stream), "{stream} at {joined} was to be settled");
                        assert!(moment <= joined);
                    }
                    _ => {}
                }
            }
        }
    }

    fn run(&mut self, bytes: u64, stream: StreamId) {
        let longest = self.longest(|grain| !matches!(grain, Grain::Used { .. }));
        let Some(run) = self.heap.find_run(bytes, stream) else {
            assert!(longest < bytes, "there was a run for {bytes} bytes");
            return;
        };
        assert!(!run.after.contains_key(&stream), "a stream need not wait for itself");
        assert_eq!(self.heap.take_run(&run, bytes), Some(run.start));
        self.taken(run.start, bytes, |grain| match grain {
            Grain::Free => true,
            Grain::Freed { stream: other, moment } => {
                other == stream || run.after.get(&other).is_some_and(|until| moment <= *until)
            }
            Grain::Used { .. } => false,
        });
    }

    fn trim(&mut self) {
        let mut removed = Vec::new();
        while let Some((start, bytes)) = self.heap.remove_empty_segment() {
            assert_eq!(bytes, SEGMENT_GRAINS * GRAIN_BYTES);
            assert!(Self::grains_of(start, bytes).all(|at| self.grains.get(&at) == Some(&Grain::Free)));
            removed.push(start);
        }
        let is_empty = |start: u64| {
            Self::grains_of(start, SEGMENT_GRAINS * GRAIN_BYTES).all(|at| self.grains[&at] == Grain::Free)
        };
        assert_eq!(removed.len(), SEGMENTS.iter().filter(|start| is_empty(**start)).count());
        for start in removed {
            self.add(start);
        }
    }

    /// The heap's books agree with each other and with the model.
    fn check(&self) {
        let mut at = None;
        for (start, block) in &self.heap.blocks {
            let is_first = SEGMENTS.contains(start);
            assert!(is_first || at == Some(*start), "no gaps");
            at = Some(start + block.bytes);
            for grain in Self::grains_of(*start, block.bytes) {
                let same = match (self.grains[&grain], block.state) {
                    (Grain::Used { start: of }, State::Used { .. }) => of == *start,
                    (Grain::Free, State::Free) => true,
                    (Grain::Freed { stream, moment }, State::Freed { stream: of, moment: joined }) => {
                        stream == of && moment <= joined
                    }
                    _ => false,
                };
                assert!(same, "{:?} in {block:?}", self.grains[&grain]);
            }
        }
        let used: u64 = self.living.values().map(|bytes| bytes.next_multiple_of(GRAIN_BYTES)).sum();
        assert_eq!(self.heap.used_bytes, used);
        let free =
            self.heap.blocks.values().filter(|block| !matches!(block.state, State::Used { .. })).count();
        assert_eq!(self.heap.by_fit.len(), free);
        for (start, bytes) in &self.living {
            let found = self.heap.allocation_at(start + bytes - 1);
            assert_eq!(found.map(|(at, asked, _)| (at, asked)), Some((*start, *bytes)));
        }
        let counted: u64 = self.heap.segments().map(|(start, bytes)| self.heap.count_in(start, bytes)).sum();
        assert_eq!(counted, self.living.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn whatever_is_done_memory_is_handed_out_in_order_only(steps in steps()) {
        let mut model = Model::new();
        for step in steps {
            match step {
                Step::Take { bytes, stream } => model.take(bytes, stream),
                Step::Free { which, stream } => model.free(which, stream),
                Step::Settle { stream, back } => model.settle(stream, back),
                Step::Run { bytes, stream } => model.run(bytes, stream),
                Step::Trim => model.trim(),
            }
            model.check();
        }
    }
}

#[test]
fn a_stream_gets_its_own_at_once_and_others_only_what_has_settled() {
    let mut heap = Heap::default();
    heap.add_segment(SEGMENTS[2], 4 * GRAIN_BYTES);
    let all = heap.take(4 * GRAIN_BYTES, 1).expect("room");
    assert_eq!(heap.take(1, 1), None);
    assert!(heap.free(all, Some((1, 7))));
    assert_eq!(heap.take(1, 2), None);
    let first = heap.take(1, 1).expect("its own");
    assert_eq!(first, all);
    heap.settle(1, 6);
    assert_eq!(heap.take(1, 2), None);
    // The rest of what was freed is still known by its moment, although where it began is in use again.
    heap.settle(1, 7);
    assert!(heap.take(1, 2).is_some());
}

#[test]
fn sizes_that_there_cannot_be_are_refused() {
    let mut heap = Heap::default();
    heap.add_segment(SEGMENTS[2], 4 * GRAIN_BYTES);
    assert_eq!(heap.take(u64::MAX, 1), None);
    assert_eq!(heap.find_run(u64::MAX, 1), None);
    assert_eq!(heap.take(4 * GRAIN_BYTES + 1, 1), None);
}

#[test]
fn a_hundred_thousand_allocations_are_nothing_special() {
    const COUNT: u64 = 100_000;
    let mut heap = Heap::default();
    heap.add_segment(0, COUNT * GRAIN_BYTES);
    let taken: Vec<u64> = (0..COUNT).filter_map(|index| heap.take(GRAIN_BYTES, index % 8)).collect();
    assert_eq!(taken.len() as u64, COUNT);
    for (moment, start) in taken.iter().step_by(2).enumerate() {
        assert!(heap.free(*start, Some((moment as u64 % 8, moment as u64))));
    }
    for start in taken.iter().skip(1).step_by(2) {
        assert!(heap.free(*start, None));
    }
    for stream in 0..8 {
        heap.settle(stream, COUNT);
    }
    assert_eq!(heap.remove_empty_segment(), Some((0, COUNT * GRAIN_BYTES)));
    assert!(heap.blocks.is_empty() && heap.by_fit.is_empty() && heap.by_moment.is_empty());
}
