//! Which memory of the program's own calls this process has exported or imported by descriptors, see
//! [`Capability`].
//!
//! ```text
//!              export                       unused, and no descriptor is left
//!   (not here) ------> exported by this one ---------------------------------> (not here)
//!
//!              import, fetched              unused
//!   (not here) ------> imported by this one ---------------------------------> (not here)
//! ```
//!
//! With the driver, exported memory lives until the last descriptor of it is closed, and imported memory for as long as it
//! is in use, whatever the process does that has created it. Here that process keeps its memory for them: it is the one
//! that saves it. A process that has imported memory keeps a descriptor of it for as long. So the owner need only know
//! whether there are descriptors, which the kernel tells it ([`Root::has_descriptors`]). Nothing depends on what a
//! launcher has heard.

use std::collections::BTreeMap;

use ckpt_protocol::agent::ShareKey as Key;

use super::capability::{Hold, Root};
use crate::cuda::memory::physical::Id;
use crate::cuda::shared::Shared;

/// Memory of this process.
struct Export {
    allocation: Id,
    /// Without it, the memory is kept until the process ends.
    root: Option<Root>,
}

/// Memory of another process.
struct Import {
    allocation: Id,
    owner: u32,
    _hold: Hold,
}

/// What was exchanged. Keys are never reused.
#[derive(Default)]
pub(super) struct Table {
    exports: BTreeMap<Key, Export>,
    imports: BTreeMap<Key, Import>,
}

/// The lock is taken inside [`crate::fork::while_none`] only, so that it is free in the child of a fork.
pub(super) static TABLE: Shared<Table> =
    Shared::new(Table { exports: BTreeMap::new(), imports: BTreeMap::new() });

impl Table {
    /// The root of exported memory; `None` if it was not exported, or has none.
    pub fn root(&self, key: Key) -> Option<&Root> {
        self.exports.get(&key)?.root.as_ref()
    }

    /// Adds exported memory. An earlier export under this key had a root that is not usable any more: its descriptors
    /// are not counted by the new one, so that the memory has to be kept for good.
    pub fn add_export(&mut self, key: Key, allocation: Id, root: Option<Root>) {
        let root = if self.exports.contains_key(&key) { None } else { root };
        self.exports.insert(key, Export { allocation, root });
    }

    /// This process's memory of a key.
    pub fn exported(&self, key: Key) -> Option<Id> {
        self.exports.get(&key).map(|export| export.allocation)
    }

    /// Removes an export of which no descriptor is left; whether there is none.
    pub fn end_export(&mut self, key: Key) -> bool {
        let root = self.root(key);
        let has_ended = root.is_some_and(|root| !root.has_descriptors());
        if has_ended {
            self.exports.remove(&key);
        }
        has_ended
    }

    /// The memory that was imported under a key.
    pub fn imported(&self, key: Key) -> Option<Id> {
        self.imports.get(&key).map(|import| import.allocation)
    }

    /// Adds imported memory, in the place of memory that has ended.
    pub fn add_import(&mut self, key: Key, allocation: Id, owner: u32, hold: Hold) {
        self.imports.insert(key, Import { allocation, owner, _hold: hold });
    }

    /// Removes imported memory that has ended. Another import of the key stays.
    pub fn forget_import(&mut self, key: Key, allocation: Id) {
        if self.imported(key) == Some(allocation) {
            self.imports.remove(&key);
        }
    }

    /// The process that owns imported memory.
    pub fn owner_of(&self, key: Key) -> Option<u32> {
        self.imports.get(&key).map(|import| import.owner)
    }

    pub fn has_imports(&self) -> bool {
        !self.imports.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::time::{Duration, Instant};

    use super::super::capability::{Capability, Kind};
    use super::*;

    const KEY: Key = Key(11);
    const CAPABILITY: Capability = Capability { key: KEY, bytes: 2 << 20, owner: 7, kind: Kind::Memory };

    fn created() -> (OwnedFd, Option<Root>) {
        CAPABILITY.create().expect("made")
    }

    /// A process that another test has just forked may have a copy of a descriptor until its exec.
    fn ends(table: &mut Table) {
        let end = Instant::now() + Duration::from_secs(300);
        while !table.end_export(KEY) {
            assert!(Instant::now() < end, "no descriptor is left");
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_export_ends_with_its_last_descriptor() {
        let mut table = Table::default();
        assert!(!table.end_export(KEY), "it is not known");
        let (descriptor, root) = created();
        table.add_export(KEY, 3, root);
        assert_eq!(table.exported(KEY), Some(3));
        let second = table.root(KEY).expect("a root").descriptor().expect("opened");
        drop(descriptor);
        assert!(!table.end_export(KEY));
        drop(second);
        ends(&mut table);
        assert_eq!(table.exported(KEY), None);
    }

    /// Its descriptors could not be told from those of the new one.
    #[test]
    fn an_export_whose_root_was_lost_does_not_end() {
        let mut table = Table::default();
        let (first, root) = created();
        table.add_export(KEY, 3, root);
        let (second, root) = created();
        table.add_export(KEY, 3, root);
        drop(second);
        assert!(!table.end_export(KEY));
        drop(first);
        assert!(!table.end_export(KEY));
        assert_eq!(table.exported(KEY), Some(3));
    }

    #[test]
    fn an_import_holds_the_memory_of_its_owner() {
        let (mut owner, mut importer) = (Table::default(), Table::default());
        let (descriptor, root) = created();
        owner.add_export(KEY, 3, root);
        importer.add_import(KEY, 5, 7, Hold::of(descriptor.as_raw_fd()).expect("held"));
        let passed_on = descriptor.try_clone().expect("one more");
        drop(descriptor);
        assert_eq!((importer.imported(KEY), importer.owner_of(KEY)), (Some(5), Some(7)));
        assert!(importer.has_imports() && !owner.end_export(KEY));
        importer.forget_import(KEY, 4);
        assert!(importer.has_imports(), "another import of the key has ended");
        importer.forget_import(KEY, 5);
        assert!(!importer.has_imports() && !owner.end_export(KEY), "it was passed on");
        drop(passed_on);
        ends(&mut owner);
    }
}
