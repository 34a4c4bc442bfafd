//! Memory of other processes that this one has opened.
//!
//! Each context has a mapping of its own of each physical allocation in which it has opened memory, as with the
//! driver's own IPC; and so has each imported pool. The allocations in it are counted one by one.

use std::collections::BTreeMap;

use ckpt_protocol::agent::ShareKey as Key;
use cuda_abi::types::CUdeviceptr;

use super::handle::Handle;
use crate::cuda::shared::Shared;

/// For whom another process's memory is mapped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Opener {
    /// The context in which it was opened.
    Context(usize),
    /// The imported pool, by its number in this process.
    Pool(u64),
}

/// A physical allocation of another process's memory, mapped for one opener.
pub(crate) struct Import {
    pub key: Key,
    pub owner: u32,
    pub opener: Opener,
    /// Of the mapping, which has a reservation of its own.
    pub address: CUdeviceptr,
    pub bytes: u64,
    /// By their offset: the size of each allocation, and how often it is open.
    pub allocations: BTreeMap<u64, Opened>,
}

pub(crate) struct Opened {
    bytes: u64,
    count: u64,
    id: u64,
}

/// An allocation of another process that is open in this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub address: CUdeviceptr,
    pub bytes: u64,
    pub opener: Opener,
    /// Never the same twice in the life of the process, and none that the driver or the arena would give.
    pub id: u64,
}

/// The state after closing an allocation.
pub(super) enum Closed {
    /// It is still used.
    Open,
    /// No allocation in it is open any more.
    Unused(Import),
}

#[derive(Default)]
pub(super) struct Imports {
    by_address: BTreeMap<CUdeviceptr, Import>,
    by_key: BTreeMap<(Key, Opener), CUdeviceptr>,
    last_id: u64,
}

/// The arena counts its own from 2^40.
const FIRST_ID: u64 = 1 << 56;

pub(super) static IMPORTS: Shared<Imports> =
    Shared::new(Imports { by_address: BTreeMap::new(), by_key: BTreeMap::new(), last_id: FIRST_ID });

impl Imports {
    /// Opens an allocation in memory that is mapped for the opener already; returns its address.
    pub fn open(&mut self, handle: &Handle, opener: Opener) -> Option<CUdeviceptr> {
        let address = *self.by_key.get(&(handle.key, opener))?;
        let import = self.by_address.get_mut(&address).filter(|import| handle.fits(import.bytes))?;
        let opened = import.allocations.entry(handle.offset).or_insert_with(|| {
            self.last_id += 1;
            Opened { bytes: handle.bytes, count: 0, id: self.last_id }
        });
        opened.count += 1;
        Some(address + handle.offset)
    }

    /// Adds memory that was just mapped, or returns it to the caller if another thread was faster.
    pub fn add(&mut self, import: Import) -> Result<(), Import> {
        if self.by_key.contains_key(&(import.key, import.opener)) {
            return Err(import);
        }
        self.by_key.insert((import.key, import.opener), import.address);
        self.by_address.insert(import.address, import);
        Ok(())
    }

    /// The allocation that an address lies in.
    pub fn find(&self, address: CUdeviceptr) -> Option<Allocation> {
        let (&start, import) = self.by_address.range(..=address).next_back()?;
        let (&offset, opened) = import.allocations.range(..=address - start).next_back()?;
        let Opened { bytes, id, .. } = *opened;
        let found = Allocation { address: start + offset, bytes, opener: import.opener, id };
        (address - found.address < bytes).then_some(found)
    }

    /// Closes the allocation that begins at an address, once; `None` if there is none.
    pub fn close(&mut self, address: CUdeviceptr) -> Option<Closed> {
        let (&start, import) = self.by_address.range_mut(..=address).next_back()?;
        let offset = address - start;
        let opened = import.allocations.get_mut(&offset)?;
        opened.count -= 1;
        if opened.count == 0 {
            import.allocations.remove(&offset);
        }
        if import.allocations.is_empty() {
            self.remove(start).map(Closed::Unused)
        } else {
            Some(Closed::Open)
        }
    }

    /// Closes an allocation of an imported pool, once; `None` if none begins at the address.
    pub fn close_of_pool(&mut self, address: CUdeviceptr) -> Option<Closed> {
        let found = self.find(address).filter(|found| found.address == address)?;
        matches!(found.opener, Opener::Pool(_)).then(|| self.close(address))?
    }

    /// Where memory is mapped for an opener, and how long that is.
    pub fn ranges_of(&self, opener: Opener) -> Vec<(CUdeviceptr, u64)> {
        let of_it = self.by_address.values().filter(|import| import.opener == opener);
        of_it.map(|import| (import.address, import.bytes)).collect()
    }

    /// The bytes of the allocations that an opener has open.
    pub fn opened_bytes(&self, opener: Opener) -> u64 {
        let of_it = self.by_address.values().filter(|import| import.opener == opener);
        of_it.flat_map(|import| import.allocations.values()).map(|opened| opened.bytes).sum()
    }

    /// Removes all memory that an opener has open.
    pub fn take_all_of(&mut self, opener: Opener) -> Vec<Import> {
        let of_it = self.by_address.values().filter(|import| import.opener == opener);
        let starts: Vec<_> = of_it.map(|import| import.address).collect();
        starts.into_iter().filter_map(|start| self.remove(start)).collect()
    }

    /// The process that owns opened memory.
    pub fn owner_of(&self, key: Key) -> Option<u32> {
        let (_, address) =
            self.by_key.range((key, Opener::Context(0))..=(key, Opener::Pool(u64::MAX))).next()?;
        self.by_address.get(address).map(|import| import.owner)
    }

    pub fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    fn remove(&mut self, start: CUdeviceptr) -> Option<Import> {
        let import = self.by_address.remove(&start)?;
        self.by_key.remove(&(import.key, import.opener));
        Some(import)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key(9);
    const CONTEXT: Opener = Opener::Context(0x1000);
    const OTHER: Opener = Opener::Context(0x1001);

    fn import(opener: Opener, address: CUdeviceptr) -> Import {
        Import { key: KEY, owner: 7, opener, address, bytes: 1000, allocations: BTreeMap::new() }
    }

    fn handle(offset: u64) -> Handle {
        Handle { key: KEY, offset, bytes: 100, owner: 7, pool: 0 }
    }

    #[test]
    fn an_allocation_is_open_as_often_as_it_was_opened() {
        let mut imports = Imports::default();
        assert_eq!(imports.open(&handle(0), CONTEXT), None);
        assert!(imports.add(import(CONTEXT, 5000)).is_ok());
        assert_eq!(imports.open(&handle(200), CONTEXT), Some(5200));
        assert_eq!(imports.open(&handle(200), CONTEXT), Some(5200));
        assert_eq!(imports.open(&handle(500), CONTEXT), Some(5500));
        assert_eq!(imports.open(&handle(901), CONTEXT), None, "does not fit");
        assert_eq!(imports.open(&handle(200), OTHER), None);
        assert!(imports.add(import(CONTEXT, 7000)).is_err());
        assert!(imports.add(import(OTHER, 8000)).is_ok());
        assert!(imports.close(5201).is_none() && imports.close(4000).is_none());
        for address in [5200, 5500] {
            assert!(matches!(imports.close(address), Some(Closed::Open)));
        }
        assert!(imports.close(5500).is_none());
        assert_eq!(imports.owner_of(KEY), Some(7));
        let Some(Closed::Unused(unused)) = imports.close(5200) else { panic!("still open") };
        assert_eq!((unused.address, unused.opener), (5000, CONTEXT));
        assert!(imports.close(5200).is_none());
        assert_eq!(imports.take_all_of(OTHER).len(), 1);
        assert!(imports.is_empty());
        assert_eq!(imports.owner_of(KEY), None);
    }

    #[test]
    fn only_allocations_of_pools_are_freed() {
        let (mut imports, pool) = (Imports::default(), Opener::Pool(4));
        assert!(imports.add(import(CONTEXT, 5000)).is_ok());
        assert!(imports.add(import(pool, 7000)).is_ok());
        for opener in [CONTEXT, pool, pool] {
            imports.open(&handle(200), opener);
        }
        imports.open(&handle(0), pool);
        assert_eq!((imports.opened_bytes(pool), imports.ranges_of(pool)), (200, vec![(7000, 1000)]));
        assert!(imports.close_of_pool(5200).is_none() && imports.close_of_pool(7201).is_none());
        for address in [7200, 7000] {
            assert!(matches!(imports.close_of_pool(address), Some(Closed::Open)));
        }
        assert!(matches!(imports.close_of_pool(7200), Some(Closed::Unused(_))));
        assert_eq!(imports.owner_of(KEY), Some(7), "the context has it");
    }

    #[test]
    fn addresses_are_found_inside_allocations_only() {
        let mut imports = Imports::default();
        assert!(imports.add(import(CONTEXT, 5000)).is_ok());
        imports.open(&handle(200), CONTEXT);
        for address in [4999, 5000, 5199, 5300] {
            assert_eq!(imports.find(address), None);
        }
        let found = Allocation { address: 5200, bytes: 100, opener: CONTEXT, id: 1 };
        assert_eq!((imports.find(5200), imports.find(5299)), (Some(found), Some(found)));
    }
}
