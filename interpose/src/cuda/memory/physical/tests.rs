//! When physical allocations live and where they are mapped, against a model.

use proptest::prelude::*;

use super::*;

const PIECES: usize = 4;
const SLOTS: u64 = 12;
const SLOT_BYTES: u64 = 2 << 20;

#[derive(Debug, Clone)]
enum Step {
    Retain(usize),
    Release(usize),
    Map { allocation: usize, slot: u64, slots: u64 },
    Unmap { slot: u64, slots: u64 },
    FailToUnmap { slot: u64, slots: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SLOTS, 1..=3_u64);
    prop_oneof![
        (0..PIECES).prop_map(Step::Retain),
        (0..PIECES).prop_map(Step::Release),
        (0..PIECES, range()).prop_map(|(allocation, (slot, slots))| Step::Map { allocation, slot, slots }),
        range().prop_map(|(slot, slots)| Step::Unmap { slot, slots }),
        range().prop_map(|(slot, slots)| Step::FailToUnmap { slot, slots }),
    ]
}

/// What has to be true, as plainly as it can be said.
#[derive(Default)]
struct Model {
    references: [u32; PIECES],
    /// Start, length and physical allocation.
    mappings: Vec<(u64, u64, usize)>,
    is_dead: [bool; PIECES],
}

impl Model {
    fn is_free(&self, slot: u64, slots: u64) -> bool {
        self.mappings.iter().all(|(start, len, _)| start + len <= slot || slot + slots <= *start)
    }

    fn is_whole(&self, slot: u64, slots: u64) -> bool {
        let inside = self.mappings.iter().filter(|(start, ..)| (slot..slot + slots).contains(start));
        inside
            .map(|(start, len, _)| if start + len <= slot + slots { *len } else { u64::MAX / 8 })
            .sum::<u64>()
            == slots
    }

    fn bury(&mut self) {
        for allocation in 0..PIECES {
            let is_mapped = self.mappings.iter().any(|(.., mapped)| *mapped == allocation);
            self.is_dead[allocation] |= self.references[allocation] == 0 && !is_mapped;
        }
    }
}

/// The registry's part of what the functions above do, with a driver that does not object.
struct Noted {
    registry: Registry,
    ids: Vec<Id>,
    dead: Vec<Id>,
}

impl Noted {
    fn new() -> Self {
        let mut registry = Registry::default();
        let allocation = |number: u64| PhysicalAllocation {
            kind: RegionKind::Program,
            device: 0,
            bytes: 3 * SLOT_BYTES,
            source: Source::Unknown,
            handle: number,
            mappings: Vec::new(),
            references: 1,
            is_exported: false,
            team: None,
            bound: 0,
            obstacle: None,
            mirrored: Mirrored::default(),
            parked: None,
            origin: Backtrace::default(),
        };
        let ids = (0..PIECES as u64).map(|number| registry.add(allocation(number))).collect();
        Self { registry, ids, dead: Vec::new() }
    }

    fn release(&mut self, id: Id) -> bool {
        let was_there = self.registry.release(id);
        self.dead.extend(self.registry.take_dead(id).map(|_| id));
        was_there
    }

    fn map(&mut self, id: Id, slot: u64, slots: u64) {
        self.registry.retain(id).expect("alive");
        let mapping = Mapping {
            address: slot * SLOT_BYTES,
            bytes: slots * SLOT_BYTES,
            access: Vec::new(),
            is_mapped: true,
        };
        self.registry.note_mapping(id, mapping);
        self.release(id);
    }

    fn unmap(&mut self, slot: u64, slots: u64, is_done: bool) {
        for (id, mapping) in self.registry.take_mappings(slot * SLOT_BYTES, slots * SLOT_BYTES) {
            if !is_done {
                self.registry.note_mapping(id, mapping);
            }
            self.release(id);
        }
    }

    fn take(&mut self, step: &Step, model: &mut Model) {
        match *step {
            Step::Retain(allocation) => {
                assert_eq!(self.registry.retain(self.ids[allocation]).is_some(), !model.is_dead[allocation]);
                model.references[allocation] += u32::from(!model.is_dead[allocation]);
            }
            Step::Release(allocation) => {
                assert_eq!(self.release(self.ids[allocation]), model.references[allocation] > 0);
                model.references[allocation] = model.references[allocation].saturating_sub(1);
            }
            Step::Map { allocation, slot, slots } => {
                if !model.is_dead[allocation] && model.is_free(slot, slots) {
                    self.map(self.ids[allocation], slot, slots);
                    model.mappings.push((slot, slots, allocation));
                }
            }
            Step::Unmap { slot, slots } => {
                let is_whole = model.is_whole(slot, slots);
                self.unmap(slot, slots, is_whole);
                if is_whole {
                    model.mappings.retain(|(start, ..)| !(slot..slot + slots).contains(start));
                }
            }
            Step::FailToUnmap { slot, slots } => self.unmap(slot, slots, false),
        }
        model.bury();
    }

    fn compare(&self, model: &Model) {
        for (allocation, id) in self.ids.iter().enumerate() {
            assert_eq!(
                self.dead.iter().filter(|dead| *dead == id).count(),
                usize::from(model.is_dead[allocation])
            );
            let known = self.registry.allocations.get(id);
            assert_eq!(known.is_none(), model.is_dead[allocation]);
            let mut mapped: Vec<_> = known.map_or(&[][..], |known| &known.mappings).to_vec();
            mapped.sort_by_key(|mapping| mapping.address);
            let mapped: Vec<_> =
                mapped.iter().map(|one| (one.address / SLOT_BYTES, one.bytes / SLOT_BYTES)).collect();
            let mut meant: Vec<_> =
                model.mappings.iter().filter(|one| one.2 == allocation).map(|one| (one.0, one.1)).collect();
            meant.sort_unstable();
            assert_eq!(mapped, meant);
            assert_eq!(known.map_or(0, |known| known.references), model.references[allocation]);
        }
        for slot in 0..SLOTS + 3 {
            for slots in 0..=3 {
                let address = slot * SLOT_BYTES + u64::from(slots > 0);
                let bytes = (slots * SLOT_BYTES).saturating_sub(2);
                let in_range = self.registry.allocations_in(address, bytes).map(|(id, _)| id);
                let touches =
                    |(start, len, _): &&(u64, u64, usize)| *start < slot + slots && slot < start + len;
                let mut meant: Vec<_> =
                    model.mappings.iter().filter(|_| slots > 0).filter(touches).copied().collect();
                meant.sort_unstable();
                assert!(in_range.eq(meant.iter().map(|one| self.ids[one.2])), "{slot} {slots}");
            }
            let at = self.registry.at(slot * SLOT_BYTES).map(|(id, start, _)| (id, start / SLOT_BYTES));
            let meant = model.mappings.iter().find(|one| (one.0..one.0 + one.1).contains(&slot));
            assert_eq!(at, meant.map(|one| (self.ids[one.2], one.0)));
        }
    }
}

proptest! {
    #[test]
    fn pieces_live_until_they_are_released_as_often_and_mapped_nowhere(
        steps in proptest::collection::vec(step(), 0..60)
    ) {
        let mut model = Model { references: [1; PIECES], ..Model::default() };
        let mut noted = Noted::new();
        for step in &steps {
            noted.take(step, &mut model);
            noted.compare(&model);
        }
    }
}
