//! Small allocations share slabs: physical allocations of some MiB.
//!
//! The size of a new slab grows with the memory in use. So there are never many slabs, and only a small part of the
//! memory is free in the newest one. One empty slab is kept for the next allocation; further ones are given back to
//! the device.

use std::collections::{BTreeMap, BTreeSet};

use cuda_abi::types::CUdeviceptr;

use super::block::Block;
use super::heap::Heap;
use super::physical::Id;

/// Every allocation begins at a multiple of this: what the driver's own have, which programs rely on for textures
/// (CUDA driver API reference, `CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT`).
const GRAIN_BYTES: u64 = 512;
const LARGEST_BYTES: u64 = 32 << 20;
/// A new slab is at most this part of what there is.
const GROWTH: u64 = 64;

/// The slabs of one device.
#[derive(Default)]
pub(super) struct Slabs {
    heap: Heap,
    slabs: BTreeMap<CUdeviceptr, Block>,
    /// Length and start of the empty ones.
    empty: BTreeSet<(u64, CUdeviceptr)>,
    bytes: u64,
}

impl Slabs {
    /// The size of the next slab.
    pub fn next_bytes(&self, granularity: u64) -> u64 {
        let wanted = (self.bytes / GROWTH).min(LARGEST_BYTES);
        (wanted - wanted % granularity).max(granularity)
    }

    pub fn add(&mut self, slab: Block) {
        self.heap.insert(slab.address, slab.bytes);
        self.empty.insert((slab.bytes, slab.address));
        self.bytes += slab.bytes;
        self.slabs.insert(slab.address, slab);
    }

    /// Room for an allocation, and the physical allocation that it is in; `None` if there is none.
    pub fn take(&mut self, bytes: u64) -> Option<(CUdeviceptr, Id)> {
        let address = self.heap.take(bytes.checked_next_multiple_of(GRAIN_BYTES)?)?;
        let slab = self.slab_around(address)?;
        self.empty.remove(&(slab.bytes, slab.address));
        Some((address, slab.allocation))
    }

    /// Frees an allocation. The returned slabs are no longer used and go back to the device.
    pub fn give(&mut self, address: CUdeviceptr, bytes: u64) -> Vec<Block> {
        let Some(slab) = self.slab_around(address) else { return Vec::new() };
        let range = slab.address..slab.address + slab.bytes;
        if self.heap.give(address, bytes.next_multiple_of(GRAIN_BYTES), range) == slab.bytes {
            self.empty.insert((slab.bytes, slab.address));
        }
        self.drop_empty(1)
    }

    pub fn empty_bytes(&self) -> u64 {
        self.empty.iter().map(|(bytes, _)| bytes).sum()
    }

    fn slab_around(&self, address: CUdeviceptr) -> Option<Block> {
        self.slabs.range(..=address).next_back().map(|(_, slab)| *slab)
    }

    /// Removes empty slabs until so many are left, the largest first.
    pub fn drop_empty(&mut self, left: usize) -> Vec<Block> {
        let mut dropped = Vec::new();
        while self.empty.len() > left
            && let Some((bytes, address)) = self.empty.pop_last()
        {
            self.heap.remove(address);
            self.bytes -= bytes;
            dropped.extend(self.slabs.remove(&address));
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULARITY: u64 = 2 << 20;

    /// A size of which the power of two is uniformly distributed.
    fn size(random: &mut fastrand::Rng) -> u64 {
        let limit = 1 << random.u32(..21);
        random.u64(1..=limit)
    }

    /// Slabs as a device would give them, each beginning where the one before ends.
    struct Device {
        slabs: Slabs,
        next: CUdeviceptr,
        given: BTreeMap<CUdeviceptr, Block>,
        live: BTreeMap<CUdeviceptr, u64>,
    }

    impl Device {
        fn new() -> Self {
            Self { slabs: Slabs::default(), next: GRANULARITY, given: BTreeMap::new(), live: BTreeMap::new() }
        }

        fn allocate(&mut self, bytes: u64) -> CUdeviceptr {
            let (address, allocation) = self.slabs.take(bytes).unwrap_or_else(|| {
                let wanted = self.slabs.next_bytes(GRANULARITY);
                assert!(wanted.is_multiple_of(GRANULARITY) && wanted <= LARGEST_BYTES);
                let slab = Block { address: self.next, bytes: wanted, allocation: self.next };
                self.next += wanted;
                self.given.insert(slab.address, slab);
                self.slabs.add(slab);
                self.slabs.take(bytes).expect("room in a new slab")
            });
            let slab = self.given[&allocation];
            assert!(address.is_multiple_of(GRAIN_BYTES));
            assert!(slab.address <= address && address + bytes <= slab.address + slab.bytes);
            let before = self.live.range(..=address).next_back();
            assert!(before.is_none_or(|(start, bytes)| start + bytes <= address));
            let after = self.live.range(address..).next();
            assert!(after.is_none_or(|(start, _)| address + bytes <= *start));
            self.live.insert(address, bytes);
            address
        }

        fn free(&mut self, address: CUdeviceptr) {
            let bytes = self.live.remove(&address).expect("it is live");
            for slab in self.slabs.give(address, bytes) {
                self.forget(slab);
            }
        }

        fn forget(&mut self, slab: Block) {
            assert_eq!(self.given.remove(&slab.address), Some(slab));
            assert!(self.live.range(slab.address..slab.address + slab.bytes).next().is_none());
        }

        fn given_bytes(&self) -> u64 {
            self.given.values().map(|slab| slab.bytes).sum()
        }
    }

    #[test]
    fn a_hundred_thousand_live_and_none_overlap_and_all_comes_back() {
        let (mut device, mut random) = (Device::new(), fastrand::Rng::with_seed(1));
        let mut addresses = Vec::new();
        while addresses.len() < 100_000 {
            if random.u8(..4) == 0 && !addresses.is_empty() {
                let which = random.usize(..addresses.len());
                device.free(addresses.swap_remove(which));
            } else {
                addresses.push(device.allocate(size(&mut random)));
            }
        }
        let used: u64 = device.live.values().map(|bytes| bytes.next_multiple_of(GRAIN_BYTES)).sum();
        assert_eq!(device.slabs.heap.free_bytes() + used, device.given_bytes());
        // Best fit fills the holes that frees have left.
        assert!(device.given_bytes() - used < used / 50, "{used} of {} are used", device.given_bytes());
        while !addresses.is_empty() {
            let which = random.usize(..addresses.len());
            device.free(addresses.swap_remove(which));
        }
        assert_eq!(device.given.len(), 1, "one empty slab stays");
        assert_eq!(device.slabs.empty_bytes(), device.given_bytes());
        for slab in device.slabs.drop_empty(0) {
            device.forget(slab);
        }
        assert!(device.given.is_empty() && device.slabs.heap.free_bytes() == 0);
        assert_eq!(device.slabs.bytes, 0);
    }

    #[test]
    fn slabs_are_small_first_and_grow_with_what_there_is() {
        let mut device = Device::new();
        let mut sizes = Vec::new();
        for _ in 0..40_000 {
            let slabs = device.given.len();
            device.allocate(128 << 10);
            if device.given.len() > slabs {
                sizes.extend(device.given.values().next_back().map(|slab| slab.bytes));
            }
        }
        assert!(sizes[..64].iter().all(|bytes| *bytes == GRANULARITY), "{sizes:?}");
        assert!(sizes.is_sorted() && sizes.last() == Some(&LARGEST_BYTES), "{sizes:?}");
        // 5 GB in a few hundred physical allocations, and the newest is a small part of it.
        assert!(sizes.len() < 400, "{} slabs", sizes.len());
        assert!(device.given_bytes() <= 40_000 * (128 << 10) * 102 / 100);
    }

    #[test]
    fn the_smallest_empty_slab_stays() {
        let mut slabs = Slabs::default();
        for (address, bytes) in [(0x1000_0000, 8 << 20), (0x2000_0000, GRANULARITY), (0x3000_0000, 4 << 20)] {
            slabs.add(Block { address, bytes, allocation: address });
        }
        let (address, allocation) = slabs.take(512).expect("room");
        assert_eq!((address, allocation), (0x2000_0000, 0x2000_0000), "the fullest first");
        let dropped: Vec<_> = slabs.give(address, 512).into_iter().map(|slab| slab.bytes).collect();
        assert_eq!(dropped, [8 << 20, 4 << 20]);
        assert_eq!(slabs.empty_bytes(), GRANULARITY);
    }

    #[test]
    fn nothing_fits_that_is_too_large() {
        let mut slabs = Slabs::default();
        assert_eq!(slabs.take(1), None);
        slabs.add(Block { address: GRANULARITY, bytes: GRANULARITY, allocation: 1 });
        assert_eq!(slabs.take(GRANULARITY + 1), None);
        assert_eq!(slabs.take(u64::MAX), None);
        assert_eq!(slabs.take(GRANULARITY), Some((GRANULARITY, 1)));
        assert_eq!(slabs.take(1), None);
        // A free of what no slab has is nothing.
        assert_eq!(slabs.give(1, 512), []);
    }
}
