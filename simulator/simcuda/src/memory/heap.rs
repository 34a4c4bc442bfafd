//! A best-fit allocator that joins free neighbours.

use std::collections::{BTreeMap, BTreeSet};

/// Every piece begins at a multiple of this (the alignment of cuMemAlloc on real parts).
pub(super) const GRAIN_BYTES: u64 = 512;

/// The free parts of some chunks of memory.
#[derive(Default)]
pub(super) struct Heap {
    /// Start to length.
    chunks: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
    /// Length and start of each free part.
    free_by_len: BTreeSet<(u64, u64)>,
}

impl Heap {
    pub(super) const fn new() -> Self {
        Self { chunks: BTreeMap::new(), free: BTreeMap::new(), free_by_len: BTreeSet::new() }
    }

    /// How many bytes a request takes.
    pub(super) fn rounded(size_bytes: u64) -> u64 {
        size_bytes.checked_next_multiple_of(GRAIN_BYTES).unwrap_or(u64::MAX)
    }

    pub(super) fn add_chunk(&mut self, start: u64, len: u64) {
        self.chunks.insert(start, len);
        self.insert_free(start, len);
    }

    /// Takes a piece out of the smallest free part that is large enough.
    pub(super) fn take(&mut self, size_bytes: u64) -> Option<u64> {
        let len = Self::rounded(size_bytes);
        let (free_len, start) = *self.free_by_len.range((len, 0)..).next()?;
        self.remove_free(start, free_len);
        if free_len > len {
            self.insert_free(start + len, free_len - len);
        }
        Some(start)
    }

    /// Puts a piece back. Says which chunk it is in if all of that chunk is free now.
    pub(super) fn give(&mut self, start: u64, size_bytes: u64) -> Option<u64> {
        let (mut start, mut len) = (start, Self::rounded(size_bytes));
        let (&chunk, &chunk_len) = self.chunks.range(..=start).next_back()?;
        if let Some((&before, &before_len)) = self.free.range(chunk..start).next_back()
            && before + before_len == start
        {
            self.remove_free(before, before_len);
            start = before;
            len += before_len;
        }
        let end = start + len;
        if end < chunk + chunk_len
            && let Some(&after_len) = self.free.get(&end)
        {
            self.remove_free(end, after_len);
            len += after_len;
        }
        self.insert_free(start, len);
        (len == chunk_len).then_some(chunk)
    }

    /// Forgets a chunk that is free.
    pub(super) fn remove_chunk(&mut self, start: u64) {
        if let Some(len) = self.chunks.remove(&start) {
            self.remove_free(start, len);
        }
    }

    /// Chunks that are free altogether, and their lengths.
    pub(super) fn free_chunks(&self) -> Vec<(u64, u64)> {
        let is_free = |(start, len): &(&u64, &u64)| self.free.get(start) == Some(len);
        self.chunks.iter().filter(is_free).map(|(start, len)| (*start, *len)).collect()
    }

    fn insert_free(&mut self, start: u64, len: u64) {
        self.free.insert(start, len);
        self.free_by_len.insert((len, start));
    }

    fn remove_free(&mut self, start: u64, len: u64) {
        self.free.remove(&start);
        self.free_by_len.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_come_back(
            steps in proptest::collection::vec((any::<bool>(), 1_u64..9000, any::<prop::sample::Index>()), 1..300),
        ) {
            let chunks = [(0x10_0000, 64 << 10), (0x11_0000, 32 << 10), (0x40_0000, 16 << 10)];
            let mut heap = Heap::new();
            for (start, len) in chunks {
                heap.add_chunk(start, len);
            }
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (take, size, which) in steps {
                if take {
                    let Some(start) = heap.take(size) else { continue };
                    let end = start + Heap::rounded(size);
                    prop_assert!(chunks.iter().any(|(chunk, len)| *chunk <= start && end <= chunk + len));
                    prop_assert!(live.iter().all(|(s, l)| end <= *s || s + Heap::rounded(*l) <= start));
                    live.push((start, size));
                } else if !live.is_empty() {
                    let (start, size) = live.swap_remove(which.index(live.len()));
                    heap.give(start, size);
                }
            }
            for (start, size) in live {
                heap.give(start, size);
            }
            prop_assert_eq!(heap.free_chunks(), chunks);
        }
    }
}
