//! How many operations there are on which communicators: of a group, a capture, or a graph.

use std::sync::Arc;

use super::Entry;

/// What is kept of communicators that have none any more: the next group is mostly about the same ones.
const KEPT: usize = 16;

/// Operations per communicator. A capture collects them, an instantiated graph has a copy of its graph's, and each
/// launch of it is one step with all of them.
#[derive(Clone, Default)]
pub struct Counts {
    all: Vec<(Arc<Entry>, u32)>,
    /// How many of them there are. Those that follow are kept from before.
    count: usize,
}

impl Counts {
    /// Adds operations.
    #[inline]
    pub fn add(&mut self, entry: &Arc<Entry>, operations: u32) {
        match self.all.iter().position(|(known, _)| Arc::ptr_eq(known, entry)) {
            Some(place) if place < self.count => self.all[place].1 += operations,
            Some(place) => {
                self.all[place].1 = operations;
                self.all.swap(place, self.count);
                self.count += 1;
            }
            None => {
                self.all.insert(self.count, (Arc::clone(entry), operations));
                self.count += 1;
            }
        }
    }

    /// Adds all of another one, as of a child graph.
    pub fn add_all(&mut self, other: &Self) {
        other.step().iter().for_each(|(entry, operations)| self.add(entry, *operations));
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The step for [`Clock::begin`](super::Clock::begin).
    #[must_use]
    pub fn step(&self) -> &[(Arc<Entry>, u32)] {
        &self.all[..self.count]
    }

    /// Forgets all operations.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.all.truncate(KEPT);
    }
}
