//! Assigns each physical allocation its offset in the mirror.
//!
//! A physical allocation keeps its offset as long as it lives, so that unchanged memory need not be copied again.
//! Gaps that freed allocations leave are reused. When too much of the mirror is gaps, all offsets are assigned anew,
//! and all memory is copied again.

use std::collections::BTreeSet;

use super::physical::{Mirrored, PhysicalAllocation, Registry, Source};

/// Gaps may take a quarter of what is in use, and this.
const GAPS_BYTES: u64 = 64 << 20;

/// Assigns an offset to every physical allocation that is captured; returns the size that the mirror needs, in bytes.
pub(crate) fn place(registry: &mut Registry) -> u64 {
    let allocations: Vec<&mut PhysicalAllocation> =
        registry.allocations.values_mut().filter(|allocation| is_captured(allocation)).collect();
    let mut places: Vec<(u64, Place<'_>)> = allocations
        .into_iter()
        .map(|allocation| (allocation.bytes, Place { mirrored: &mut allocation.mirrored }))
        .collect();
    let used_bytes: u64 = places.iter().map(|(bytes, _)| bytes).sum();
    let end = fill(&mut places);
    if end <= used_bytes + used_bytes / 4 + GAPS_BYTES {
        return end;
    }
    for (_, place) in &mut places {
        place.mirrored.forget_content();
        place.mirrored.offset = None;
    }
    fill(&mut places)
}

/// Forgets what the mirror holds, for a new mirror. The offsets stay.
pub(crate) fn forget(registry: &mut Registry) {
    registry.allocations.values_mut().for_each(|allocation| allocation.mirrored.forget_content());
}

/// Memory of another process is captured by its owner.
pub(crate) fn is_captured(allocation: &PhysicalAllocation) -> bool {
    matches!(allocation.source, Source::Created(_))
}

struct Place<'a> {
    mirrored: &'a mut Mirrored,
}

/// Assigns the missing offsets: in the smallest gap that is large enough, or at the end; returns the end.
fn fill(places: &mut [(u64, Place<'_>)]) -> u64 {
    let mut taken: Vec<(u64, u64)> =
        places.iter().filter_map(|(bytes, place)| Some((place.mirrored.offset?, *bytes))).collect();
    taken.sort_unstable();
    // Length and start: the smallest that is large enough is found at once, however many there are.
    let mut gaps = BTreeSet::new();
    let mut end = 0;
    for (offset, bytes) in taken {
        if offset > end {
            gaps.insert((offset - end, end));
        }
        end = offset + bytes;
    }
    for (bytes, place) in places.iter_mut().filter(|(_, place)| place.mirrored.offset.is_none()) {
        let gap = gaps.range((*bytes, 0)..).next().copied();
        let offset = match gap {
            Some((free, start)) => {
                gaps.remove(&(free, start));
                if free > *bytes {
                    gaps.insert((free - *bytes, start + *bytes));
                }
                start
            }
            None => {
                end += *bytes;
                end - *bytes
            }
        };
        place.mirrored.offset = Some(offset);
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Fills, and checks that no two overlap and all lie before the end.
    fn filled(allocations: &mut [(u64, Mirrored)]) -> u64 {
        let mut places: Vec<_> =
            allocations.iter_mut().map(|(bytes, mirrored)| (*bytes, Place { mirrored })).collect();
        let end = fill(&mut places);
        let mut taken: Vec<_> =
            allocations.iter().map(|(bytes, mirrored)| (mirrored.offset.expect("a place"), *bytes)).collect();
        taken.sort_unstable();
        for pair in taken.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{taken:?}");
        }
        assert!(taken.iter().all(|(offset, bytes)| offset + bytes <= end));
        end
    }

    #[test]
    fn a_place_is_kept_and_gaps_are_used_again() {
        let mut allocations: Vec<_> = [2, 4, 6, 2].map(|size| (size * MIB, Mirrored::default())).into();
        assert_eq!(filled(&mut allocations), 14 * MIB);
        let kept = allocations[3].1.offset;
        allocations[3].1.hashes = vec![[1, 2]];
        allocations.remove(1);
        allocations.extend([3, 1, 1].map(|size| (size * MIB, Mirrored::default())));
        assert_eq!(filled(&mut allocations), 15 * MIB);
        assert_eq!((allocations[2].1.offset, allocations[2].1.hashes.len()), (kept, 1));
    }

    #[test]
    fn nothing_takes_no_room() {
        assert_eq!(filled(&mut []), 0);
    }
}
