//! Handles: opaque numbers that stand for the driver's objects.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use dashmap::DashMap;

/// Handles are assigned in order and never reused, so that a stale one is detected. They look like pointers
/// and point nowhere: the top of the user address range, where nothing is mapped by default.
static NEXT: AtomicUsize = AtomicUsize::new(FIRST);

/// The handle that is given out first.
const FIRST: usize = 0x7e57_0000_0000;
const STEP: usize = 0x10;

/// A fresh handle.
pub(crate) fn fresh() -> usize {
    NEXT.fetch_add(STEP, Ordering::Relaxed)
}

/// Whether the value was given out as a handle, whatever has become of the object.
pub(crate) fn was_given(value: usize) -> bool {
    (FIRST..NEXT.load(Ordering::Relaxed)).contains(&value) && (value - FIRST).is_multiple_of(STEP)
}

/// All live objects of one kind.
pub(crate) struct Table<T> {
    objects: LazyLock<DashMap<usize, Arc<T>>>,
}

impl<T> Table<T> {
    /// An empty table, for a `static`.
    pub(crate) const fn new() -> Self {
        Self { objects: LazyLock::new(DashMap::new) }
    }

    /// Adds what `make` makes of its own handle.
    pub(crate) fn insert_with(&self, make: impl FnOnce(usize) -> T) -> Arc<T> {
        let handle = fresh();
        let object = Arc::new(make(handle));
        self.objects.insert(handle, Arc::clone(&object));
        object
    }

    /// Adds an object under a handle of its own.
    pub(crate) fn insert(&self, handle: usize, object: Arc<T>) {
        self.objects.insert(handle, object);
    }

    /// The object of a handle, if it is alive.
    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.objects.get(&handle).map(|object| Arc::clone(&object))
    }

    /// Takes the object out: its handle is invalid from now on.
    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.objects.remove(&handle).map(|(_, object)| object)
    }

    /// All live objects, in the order of their creation.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let mut all: Vec<_> =
            self.objects.iter().map(|entry| (*entry.key(), Arc::clone(entry.value()))).collect();
        all.sort_unstable_by_key(|(handle, _)| *handle);
        all.into_iter().map(|(_, object)| object).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_handle_is_never_given_out_again() {
        static TABLE: Table<u32> = Table::new();
        let mut first = 0;
        TABLE.insert_with(|handle| {
            first = handle;
            1
        });
        assert_eq!(TABLE.get(first).as_deref(), Some(&1));
        assert_eq!(TABLE.remove(first).as_deref(), Some(&1));
        let mut second = 0;
        TABLE.insert_with(|handle| {
            second = handle;
            2
        });
        assert_ne!(first, second);
        assert!(TABLE.get(first).is_none());
        assert_eq!(TABLE.all().iter().map(|value| **value).collect::<Vec<_>>(), [2]);
    }
}
