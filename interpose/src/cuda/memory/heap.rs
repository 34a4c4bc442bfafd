//! Small parts out of large ranges: best fit, and neighbours join when they come back.
//!
//! Every operation takes O(log n) in the number of free parts, and used parts cost nothing. (The crate
//! offset-allocator is faster still, but it sets aside about 30 bytes for every part that a range could have at most,
//! in use or not: 5 % of the memory, and all of it would be in each dump.)

use std::collections::{BTreeMap, BTreeSet};

/// The free parts of some ranges, which need not lie side by side.
#[derive(Default)]
pub(super) struct Heap {
    /// Start to length.
    free: BTreeMap<u64, u64>,
    /// Length and start.
    by_length: BTreeSet<(u64, u64)>,
}

impl Heap {
    /// Adds a free part.
    pub fn insert(&mut self, start: u64, length: u64) {
        self.free.insert(start, length);
        self.by_length.insert((length, start));
    }

    /// Removes a free part.
    pub fn remove(&mut self, start: u64) {
        if let Some(length) = self.free.remove(&start) {
            self.by_length.remove(&(length, start));
        }
    }

    /// Takes the beginning of the shortest free part that is long enough; returns its start.
    pub fn take(&mut self, length: u64) -> Option<u64> {
        let &(found, start) = self.by_length.range((length, 0)..).next()?;
        self.remove(start);
        if found > length {
            self.insert(start + length, found - length);
        }
        Some(start)
    }

    /// Puts a part back and joins it with its free neighbours in its range; returns the length of the resulting free
    /// part.
    pub fn give(&mut self, start: u64, length: u64, range: std::ops::Range<u64>) -> u64 {
        let (mut start, mut end) = (start, start + length);
        if let Some((&before, &length)) = self.free.range(range.start..start).next_back()
            && before + length == start
        {
            self.remove(before);
            start = before;
        }
        if end < range.end
            && let Some(&length) = self.free.get(&end)
        {
            self.remove(end);
            end += length;
        }
        self.insert(start, end - start);
        end - start
    }

    /// How much is free.
    #[cfg(test)]
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }
}
