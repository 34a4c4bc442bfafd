//! Which parts of a pool's memory are in use, and in which stream's order the others are free.
//!
//! ```text
//!                                free in a stream
//!          take, in any stream         +----------> Freed(stream, moment) --+
//!   Free ----------------------> Used -+                                    | settle: the free has happened
//!    ^                             ^   +------> Free                        |
//!    |                             |     free, with nothing left to wait for|
//!    |                             +---- take, in the same stream ----------+
//!    +----------------------------------------------------------------------+
//! ```
//!
//! Memory that was freed in a stream is free for later work of that stream at once, and for other streams when the
//! free has happened. An allocator that knows only free and used memory would have to set it aside until then, and
//! could neither split nor join it. So this allocator is our own: best fit, with neighbours in the same order joined.
//! Nothing here calls the driver. Every frequent operation takes O(log n).

use std::collections::{BTreeMap, BTreeSet};

/// Every allocation begins at a multiple of this, in bytes: what textures need (the device's attribute
/// `TEXTURE_ALIGNMENT`), more than cuMemAlloc promises.
pub(super) const GRAIN_BYTES: u64 = 512;

/// The sequence number of a free in its pool, from 1.
pub(super) type Moment = u64;

/// The driver's ID of a stream, which is never used again.
pub(super) type StreamId = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Used {
        /// The requested size.
        asked_bytes: u64,
        /// Allocations are counted.
        number: u64,
    },
    Free,
    /// Free for the stream; for others once all its frees up to the moment have happened.
    Freed {
        stream: StreamId,
        moment: Moment,
    },
}

#[derive(Clone, Copy, Debug)]
struct Block {
    bytes: u64,
    state: State,
}

/// A pool's memory: segments, each cut into blocks without gaps.
#[derive(Default)]
pub(super) struct Heap {
    /// Start to length.
    segments: BTreeMap<u64, u64>,
    blocks: BTreeMap<u64, Block>,
    /// What is not used, by the stream in whose order it is free, length and start.
    by_fit: BTreeSet<(Option<StreamId>, u64, u64)>,
    /// What is free in a stream's order only: stream, moment, start.
    by_moment: BTreeSet<(StreamId, Moment, u64)>,
    /// Segments that are entirely free.
    empty: BTreeSet<u64>,
    /// How much is in use.
    pub used_bytes: u64,
    last_number: u64,
}

/// Memory that is free, if a stream first waits for these frees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    pub start: u64,
    /// All frees of a stream up to a moment.
    pub after: BTreeMap<StreamId, Moment>,
}

/// What an allocation takes; `None` if there is no such number.
pub(super) fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRAIN_BYTES)
}

impl Heap {
    /// Adds memory that is free for all streams.
    pub fn add_segment(&mut self, start: u64, bytes: u64) {
        self.segments.insert(start, bytes);
        self.insert(start, bytes, State::Free);
    }

    /// Removes a segment that is entirely free; returns its start and length.
    pub fn remove_empty_segment(&mut self) -> Option<(u64, u64)> {
        let start = self.empty.pop_first()?;
        self.remove(start);
        let bytes = self.segments.remove(&start)?;
        Some((start, bytes))
    }

    pub fn segments(&self) -> impl Iterator<Item = (u64, u64)> {
        self.segments.iter().map(|(start, bytes)| (*start, *bytes))
    }

    /// Takes memory for a stream: the smallest block that is large enough.
    pub fn take(&mut self, asked_bytes: u64, stream: StreamId) -> Option<u64> {
        let bytes = rounded(asked_bytes)?;
        let own = self.best_fit(Some(stream), bytes);
        let anybodys = self.best_fit(None, bytes);
        let (_, start) = own.into_iter().chain(anybodys).min_by_key(|(length, _)| *length)?;
        self.cut(start, bytes, asked_bytes);
        Some(start)
    }

    fn best_fit(&self, order: Option<StreamId>, bytes: u64) -> Option<(u64, u64)> {
        let found = self.by_fit.range((order, bytes, 0)..=(order, u64::MAX, u64::MAX)).next();
        found.map(|(_, length, start)| (*length, *start))
    }

    /// Memory that could be taken if its stream waited for frees of others. Searches everything, so it is the last
    /// resort.
    pub fn find_run(&self, asked_bytes: u64, stream: StreamId) -> Option<Run> {
        let bytes = rounded(asked_bytes)?;
        for (&segment, &length) in &self.segments {
            let mut run = Run { start: segment, after: BTreeMap::new() };
            for (&start, block) in self.blocks.range(segment..segment.saturating_add(length)) {
                match block.state {
                    State::Used { .. } => {
                        run = Run { start: start + block.bytes, after: BTreeMap::new() };
                        continue;
                    }
                    State::Freed { stream: other, moment } if other != stream => {
                        let latest = run.after.entry(other).or_default();
                        *latest = moment.max(*latest);
                    }
                    State::Freed { .. } | State::Free => {}
                }
                if start + block.bytes - run.start >= bytes {
                    return Some(run);
                }
            }
        }
        None
    }

    /// Takes memory that [`Self::find_run`] has found and that is still as it was then.
    pub fn take_run(&mut self, run: &Run, asked_bytes: u64) -> Option<u64> {
        let bytes = rounded(asked_bytes)?;
        let end = run.start + bytes;
        let parts: Vec<(u64, Block)> =
            self.blocks.range(run.start..end).map(|(start, block)| (*start, *block)).collect();
        for (start, _) in &parts {
            self.remove(*start);
        }
        if let Some((start, last)) = parts.last()
            && start + last.bytes > end
        {
            self.insert(end, start + last.bytes - end, last.state);
        }
        self.insert_used(run.start, bytes, asked_bytes);
        Some(run.start)
    }

    /// Makes the beginning of a block used; the rest stays as it is.
    fn cut(&mut self, start: u64, bytes: u64, asked_bytes: u64) {
        let Some(block) = self.remove(start) else { return };
        if block.bytes > bytes {
            self.insert(start + bytes, block.bytes - bytes, block.state);
        }
        self.insert_used(start, bytes, asked_bytes);
    }

    fn insert_used(&mut self, start: u64, bytes: u64, asked_bytes: u64) {
        self.last_number += 1;
        self.insert(start, bytes, State::Used { asked_bytes, number: self.last_number });
    }

    /// Whether an allocation begins there.
    pub fn is_used(&self, start: u64) -> bool {
        matches!(self.blocks.get(&start), Some(Block { state: State::Used { .. }, .. }))
    }

    /// Frees an allocation, in a stream's order or altogether. Returns whether there was one.
    pub fn free(&mut self, start: u64, order: Option<(StreamId, Moment)>) -> bool {
        if !self.is_used(start) {
            return false;
        }
        let Some(block) = self.remove(start) else { return false };
        let state = order.map_or(State::Free, |(stream, moment)| State::Freed { stream, moment });
        self.join(start, block.bytes, state);
        true
    }

    /// The frees of a stream up to a moment have happened.
    pub fn settle(&mut self, stream: StreamId, moment: Moment) {
        let done = (stream, 0, 0)..=(stream, moment, u64::MAX);
        while let Some(&(_, _, start)) = self.by_moment.range(done.clone()).next() {
            let Some(block) = self.remove(start) else { return };
            self.join(start, block.bytes, State::Free);
        }
    }

    /// The allocation in which an address lies: its start, how much was asked for, and its number.
    pub fn allocation_at(&self, address: u64) -> Option<(u64, u64, u64)> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        match block.state {
            State::Used { asked_bytes, number } if address - start < asked_bytes => {
                Some((start, asked_bytes, number))
            }
            _ => None,
        }
    }

    /// How many allocations begin in a range.
    pub fn count_in(&self, start: u64, bytes: u64) -> u64 {
        let inside = self.blocks.range(start..start.saturating_add(bytes));
        inside.filter(|(_, block)| matches!(block.state, State::Used { .. })).count() as u64
    }

    /// Inserts a free block, joined with neighbours that are free in the same order.
    fn join(&mut self, mut start: u64, mut bytes: u64, mut state: State) {
        if !self.segments.contains_key(&start)
            && let Some((&before, block)) = self.blocks.range(..start).next_back()
            && let Some(both) = both(block.state, state)
        {
            self.remove(before);
            bytes += start - before;
            (start, state) = (before, both);
        }
        let end = start + bytes;
        if !self.segments.contains_key(&end)
            && let Some(block) = self.blocks.get(&end).copied()
            && let Some(both) = both(block.state, state)
        {
            self.remove(end);
            bytes += block.bytes;
            state = both;
        }
        self.insert(start, bytes, state);
    }

    fn insert(&mut self, start: u64, bytes: u64, state: State) {
        self.blocks.insert(start, Block { bytes, state });
        match state {
            State::Used { .. } => self.used_bytes += bytes,
            State::Free => {
                self.by_fit.insert((None, bytes, start));
                if self.segments.get(&start) == Some(&bytes) {
                    self.empty.insert(start);
                }
            }
            State::Freed { stream, moment } => {
                self.by_fit.insert((Some(stream), bytes, start));
                self.by_moment.insert((stream, moment, start));
            }
        }
    }

    fn remove(&mut self, start: u64) -> Option<Block> {
        let block = self.blocks.remove(&start)?;
        match block.state {
            State::Used { .. } => self.used_bytes -= block.bytes,
            State::Free => {
                self.by_fit.remove(&(None, block.bytes, start));
                self.empty.remove(&start);
            }
            State::Freed { stream, moment } => {
                self.by_fit.remove(&(Some(stream), block.bytes, start));
                self.by_moment.remove(&(stream, moment, start));
            }
        }
        Some(block)
    }
}

/// The state of two neighbours as one; `None` if they are not to be joined.
fn both(one: State, other: State) -> Option<State> {
    match (one, other) {
        (State::Free, State::Free) => Some(State::Free),
        (State::Freed { stream, moment }, State::Freed { stream: same, moment: also }) if stream == same => {
            Some(State::Freed { stream, moment: moment.max(also) })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
