//! How many operations there are on which communicators: of a group, a capture, or a graph.

use std::sync::Arc;

use super::Entry;

/// Operations per communicator. A capture collects them, an instantiated graph has a copy of its graph's, and each
/// launch of it is one step with all of them.
#[derive(Clone, Default)]
pub struct Counts(Vec<(Arc<Entry>, u32)>);

impl Counts {
    /// Adds operations.
    pub fn add(&mut self, entry: &Arc<Entry>, operations: u32) {
        match self.0.iter_mut().find(|(known, _)| Arc::ptr_eq(known, entry)) {
            Some((_, known)) => *known += operations,
            None => self.0.push((Arc::clone(entry), operations)),
        }
    }

    /// Adds all of another one, as of a child graph.
    pub fn add_all(&mut self, other: &Self) {
        other.0.iter().for_each(|(entry, operations)| self.add(entry, *operations));
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The step for [`Clock::begin`](super::Clock::begin).
    #[must_use]
    pub fn step(&self) -> &[(Arc<Entry>, u32)] {
        &self.0
    }

    /// Forgets all, and keeps the memory for the next ones.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
