//! Which chunks of a mirror the store already has, determined without reading the mirror.
//!
//! With each capture an agent reports the ranges of the mirror that it has written. Chunks outside of the ranges written
//! since the last commit are unchanged:
//!
//! ```text
//!   capture 7 ──► stored, committed: these chunks
//!   capture 8 ──► its save fails                     | written by 8
//!   capture 9 ──► is to be stored                    v or by 9: read. All else: the chunks of capture 7
//! ```
//!
//! # Correctness
//! Only captures write to a mirror that has content:
//!
//! - The process has the mirror mapped from staging on. After a resume it has it mapped until the next checkpoint, and its
//!   threads cannot access it. Only captures of the interposer write to it
//!   (`interpose/src/cuda/capture`), including the trial whether hashing pays off, which is part of a capture. Restoring
//!   GPU state only reads it. Children of a fork and other programs do not have it mapped.
//! - Before a capture, the agent frees chunks of zeroes and places that are not in use. The former read as zeroes as
//!   before. The latter hold nothing, and what is placed there is new to the capture, which tells it as written, even if it
//!   is zeroes.
//! - The launcher reads the mirror for the store, hands it out, and resizes it. An added part has no content; memory that
//!   is placed there is new to the capture, which writes it. When the mirror shrinks, the history is discarded.
//! - A resume fills a new mirror, which has no history.
//!
//! Captures are numbered consecutively within the lifetime of a process. A resumed process continues its count with a new
//! mirror. So if no number is missing since the commit, no capture is missing. A number is missing if the attempt failed
//! in the process, or if the launcher did not receive the report.
//!
//! The store is asked for the chunks by name. If it does not have one, or no longer, the mirror is read. So the committed
//! snapshot may have been deleted meanwhile, or be in another tier. A partial mirror lacks that content (`partial.rs`); then
//! the committed snapshot is read.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ckpt_protocol::agent::Capture;
use ckpt_snapshot::DataFile;
use ckpt_snapshot::chunk::ChunkId;

use super::partial::StoredContent;

/// The captures of one mirror since its last commit.
#[derive(Debug, Default)]
pub struct CaptureHistory {
    /// The number of the newest reported capture.
    newest: Option<u64>,
    unchanged: Option<UnchangedChunks>,
    /// The mirror has only what was written since the commit. Without [`Self::unchanged`], its content is lost.
    is_freed: bool,
    /// A chunk may have other content than the hash says that the agent knows of it.
    is_doubtful: bool,
}

/// Content that a mirror lacks.
#[derive(Debug)]
pub struct Missing {
    /// Where it can be read.
    pub stored: StoredContent,
    /// Its ranges, sorted, without overlaps.
    pub ranges: Vec<Range<u64>>,
}

/// The content of a partial mirror is not known, or cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the copy of its device memory is incomplete, since an earlier checkpoint failed. The next checkpoint copies all of it"
)]
pub struct ContentLost;

/// The committed content of a mirror, and the ranges written since: the source of chunks that need not be read.
#[derive(Debug, Clone)]
pub struct UnchangedChunks {
    committed: Arc<Committed>,
    /// Sorted, without overlaps.
    written: Vec<Range<u64>>,
}

#[derive(Debug)]
struct Committed {
    /// The ranges of the mirror that were in use, sorted, without overlaps. The rest was stored as zeroes.
    extents: Vec<Range<u64>>,
    chunks: ChunkTable,
    /// Where it can be read.
    stored: StoredContent,
}

/// The chunks of a data file: where each ends (bytes), and its name.
#[derive(Debug)]
pub struct ChunkTable(Vec<(u64, ChunkId)>);

impl ChunkTable {
    /// The chunks of `file`. There are none in version 1 of the store.
    pub fn of(file: &DataFile) -> Self {
        let mut end = 0;
        let chunks = file.chunks.iter().map(|chunk| {
            end += u64::from(chunk.bytes);
            (end, chunk.id)
        });
        Self(chunks.collect())
    }

    /// The chunk with the byte at `offset`: its range, and its name.
    pub fn at(&self, offset: u64) -> Option<(Range<u64>, ChunkId)> {
        let number = self.0.partition_point(|(end, _)| *end <= offset);
        let (end, id) = *self.0.get(number)?;
        Some((number.checked_sub(1).map_or(0, |before| self.0[before].0)..end, id))
    }
}

impl CaptureHistory {
    /// Adds a capture; `None` if the agent did not report any.
    pub fn record_capture(&mut self, capture: Option<&Capture>) {
        let follows = |capture: &&Capture| {
            self.newest.is_some_and(|newest| newest.checked_add(1) == Some(capture.number))
        };
        match (capture.filter(follows), &mut self.unchanged) {
            (Some(capture), Some(unchanged)) => {
                unchanged.written.extend(capture.written.iter().cloned());
                unchanged.written = merge_ranges(std::mem::take(&mut unchanged.written));
            }
            _ => self.unchanged = None,
        }
        self.newest = capture.map(|capture| capture.number);
    }

    /// Whether this is the newest reported capture.
    pub fn is_newest(&self, capture: u64) -> bool {
        self.newest == Some(capture)
    }

    /// The chunks that are unchanged in the mirror as this capture has left it.
    pub fn unchanged_in(&self, capture: Option<u64>) -> Option<UnchangedChunks> {
        let is_newest = capture.is_some() && capture == self.newest;
        if is_newest { self.unchanged.clone() } else { None }
    }

    /// Records that the content of this capture was committed as `file`, with `extents` in use; it can be read as `stored`.
    pub fn record_commit(
        &mut self,
        capture: Option<u64>,
        extents: Vec<Range<u64>>,
        file: &DataFile,
        stored: StoredContent,
    ) {
        if capture.is_none() || capture != self.newest {
            return;
        }
        let committed = Arc::new(Committed { extents, chunks: ChunkTable::of(file), stored });
        self.unchanged = Some(UnchangedChunks { committed, written: Vec::new() });
    }

    /// Something may have written to the device memory while it was captured: between the hash and the copy of a chunk.
    pub fn set_doubtful(&mut self) {
        self.is_doubtful = true;
    }

    /// Whether that may be so.
    pub fn is_doubtful(&self) -> bool {
        self.is_doubtful
    }

    /// Whether the mirror has only what was written since the commit.
    pub fn is_freed(&self) -> bool {
        self.is_freed
    }

    /// Whether the store has all of the content.
    pub fn may_be_freed(&self) -> bool {
        self.unchanged.as_ref().is_some_and(|unchanged| unchanged.written.is_empty())
    }

    /// The mirror is about to be freed.
    pub fn set_freed(&mut self) {
        self.is_freed = true;
    }

    /// The committed snapshot cannot be read.
    pub fn discard_commit(&mut self) {
        self.unchanged = None;
    }

    /// The committed content, if this capture is the newest.
    pub fn stored_as_of(&self, capture: u64) -> Option<StoredContent> {
        self.unchanged_in(Some(capture)).map(|unchanged| unchanged.committed.stored.clone())
    }

    /// The parts of `ranges` that the mirror lacks, and where they can be read.
    ///
    /// # Errors
    /// Nothing is known about the content.
    pub fn missing(&self, ranges: Vec<Range<u64>>) -> Result<Option<Missing>, ContentLost> {
        if !self.is_freed {
            return Ok(None);
        }
        let unchanged = self.unchanged.as_ref().ok_or(ContentLost)?;
        let ranges = merge_ranges(ranges);
        let missing = ranges.iter().flat_map(|range| unchanged.stored_in(range)).collect();
        Ok(Some(Missing { stored: unchanged.committed.stored.clone(), ranges: missing }))
    }
}

impl UnchangedChunks {
    /// The chunk that equals a range of the content, if that is known; `extents` are in use now.
    pub fn chunk(&self, range: &Range<u64>, extents: &[Range<u64>]) -> Option<ChunkId> {
        let Committed { extents: before, chunks, .. } = &*self.committed;
        let (chunk, id) = chunks.at(range.start)?;
        let is_unchanged = clipped(&self.written, range).next().is_none()
            && clipped(before, range).eq(clipped(extents, range));
        (chunk == *range && is_unchanged).then_some(id)
    }

    /// The parts of a range that were in use at the commit and were not written since.
    fn stored_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let stored: Vec<_> = clipped(&self.committed.extents, range).collect();
        stored.iter().flat_map(|part| gaps(&self.written, part)).collect()
    }

    /// The parts of a freed mirror of `bytes` that have content; in its file, `data` is not holes.
    pub fn content(&self, data: &[Range<u64>], bytes: u64) -> Vec<Range<u64>> {
        let mut content = self.stored_in(&(0..bytes));
        content.extend(self.written.iter().flat_map(|written| clipped(data, written)));
        merge_ranges(content)
    }

    /// Reads a range of a freed mirror; `from_file` reads what was written since the commit.
    ///
    /// # Errors
    /// When the file or the store cannot be read.
    pub fn read_at(
        &self,
        offset: u64,
        into: &mut [u8],
        from_file: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let range = offset..offset + into.len() as u64;
        let mut rest = into;
        let written: Vec<_> = clipped(&self.written, &range).collect();
        let mut parts: Vec<_> = gaps(&self.written, &range).map(|part| (part, false)).collect();
        parts.extend(written.into_iter().map(|part| (part, true)));
        parts.sort_unstable_by_key(|(part, _)| part.start);
        for (part, is_written) in parts {
            let bytes = usize::try_from(part.end - part.start).map_err(io::Error::other)?;
            let (now, later) = rest.split_at_mut(bytes);
            match is_written {
                true => from_file(part.start, now)?,
                false => self.committed.stored.read_at(part.start, now)?,
            }
            rest = later;
        }
        Ok(())
    }
}

/// The parts of a range that do not lie in `all`.
fn gaps(all: &[Range<u64>], range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let covered = clipped(all, range);
    let mut start = range.start;
    let mut gaps = Vec::new();
    for part in covered {
        gaps.push(start..part.start);
        start = part.end;
    }
    gaps.push(start..range.end);
    gaps.into_iter().filter(|gap| !gap.is_empty())
}

/// The parts of `all` that lie in a range.
pub fn clipped<'a>(all: &'a [Range<u64>], range: &'a Range<u64>) -> impl Iterator<Item = Range<u64>> + 'a {
    let first = all.partition_point(|one| one.end <= range.start);
    let meets = all.get(first..).unwrap_or_default().iter().take_while(|one| one.start < range.end);
    meets.map(|one| one.start.max(range.start)..one.end.min(range.end))
}

/// The ranges sorted, with adjacent and overlapping ones merged.
pub fn merge_ranges(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one range is meant")]
mod tests {
    use ckpt_snapshot::RelPath;
    use ckpt_snapshot::chunk::Chunk;

    use super::*;

    fn stored() -> StoredContent {
        crate::agents::partial::tests::stored_nowhere()
    }

    fn id(number: u8) -> ChunkId {
        ChunkId([number; 32])
    }

    /// Three chunks of 100 bytes and one of 50, with the names 1 to 4.
    fn file() -> DataFile {
        let chunk = |(number, bytes)| Chunk { id: id(number), bytes };
        DataFile {
            path: RelPath::new("gpu/5.mem").expect("a path"),
            bytes: 350,
            blake3: None,
            chunks: (1..).zip([100, 100, 100, 50]).map(chunk).collect(),
        }
    }

    fn capture(record: &mut CaptureHistory, number: u64, written: &[Range<u64>]) {
        record.record_capture(Some(&Capture { mirror: 7, number, written: written.to_vec() }));
    }

    /// Capture 5 wrote everything and was committed.
    fn committed() -> CaptureHistory {
        let mut record = CaptureHistory::default();
        capture(&mut record, 5, &[0..350]);
        record.record_commit(Some(5), vec![0..350], &file(), stored());
        record
    }

    /// The unchanged chunks after a capture, by number; 0 for a changed one.
    fn unchanged(record: &CaptureHistory, capture: u64, extents: &[Range<u64>]) -> [u8; 4] {
        let unchanged = record.unchanged_in(Some(capture));
        [0..100, 100..200, 200..300, 300..350].map(|range| {
            unchanged.as_ref().and_then(|chunks| chunks.chunk(&range, extents)).map_or(0, |ChunkId(id)| id[0])
        })
    }

    const WHOLE: &[Range<u64>] = &[0..350];

    #[test]
    fn chunks_that_were_not_written_are_unchanged() {
        let mut record = committed();
        capture(&mut record, 6, &[]);
        assert_eq!(unchanged(&record, 6, WHOLE), [1, 2, 3, 4]);
        // One byte at the end of the first chunk, and one at the start of the last.
        capture(&mut record, 7, &[99..100, 300..301]);
        assert_eq!(unchanged(&record, 7, WHOLE), [0, 2, 3, 0]);
        // Without a commit the written ranges accumulate.
        capture(&mut record, 8, &[150..160]);
        assert_eq!(unchanged(&record, 8, WHOLE), [0, 0, 3, 0]);
        record.record_commit(Some(8), vec![0..350], &file(), stored());
        capture(&mut record, 9, &[250..260]);
        assert_eq!(unchanged(&record, 9, WHOLE), [1, 2, 0, 4]);
    }

    #[test]
    fn a_missing_capture_discards_the_history() {
        for (number, why) in
            [(7, "one is missing"), (5, "repeated"), (1, "counting restarted"), (0, "never valid")]
        {
            let mut record = committed();
            capture(&mut record, number, &[]);
            assert_eq!(unchanged(&record, number, WHOLE), [0; 4], "{why}");
            capture(&mut record, number + 1, &[]);
            assert_eq!(unchanged(&record, number + 1, WHOLE), [0; 4], "{why}, and the next");
        }
        let mut record = committed();
        record.record_capture(None);
        capture(&mut record, 6, &[]);
        assert_eq!(unchanged(&record, 6, WHOLE), [0; 4], "a capture was not reported");
        let mut first = CaptureHistory::default();
        capture(&mut first, 1, &[]);
        assert_eq!(unchanged(&first, 1, WHOLE), [0; 4], "nothing was committed");
        let mut last = CaptureHistory::default();
        capture(&mut last, u64::MAX, &[]);
        last.record_commit(Some(u64::MAX), vec![0..350], &file(), stored());
        capture(&mut last, 0, &[]);
        assert_eq!(unchanged(&last, 0, WHOLE), [0; 4]);
    }

    #[test]
    fn only_the_newest_capture_can_be_committed_and_asked_for() {
        let mut record = committed();
        capture(&mut record, 6, &[]);
        assert_eq!(unchanged(&record, 5, WHOLE), [0; 4]);
        assert!(record.unchanged_in(None).is_none());
        let mut record = CaptureHistory::default();
        capture(&mut record, 5, &[0..350]);
        capture(&mut record, 6, &[0..350]);
        record.record_commit(Some(5), vec![0..350], &file(), stored());
        record.record_commit(None, vec![0..350], &file(), stored());
        capture(&mut record, 7, &[]);
        assert_eq!(unchanged(&record, 7, WHOLE), [0; 4]);
    }

    #[test]
    fn a_chunk_with_other_extents_has_changed() {
        let mut record = CaptureHistory::default();
        capture(&mut record, 5, &[0..350]);
        record.record_commit(Some(5), vec![0..120, 150..180, 210..350], &file(), stored());
        capture(&mut record, 6, &[]);
        assert_eq!(unchanged(&record, 6, &[0..120, 150..180, 210..350]), [1, 2, 3, 4]);
        assert_eq!(unchanged(&record, 6, &[0..100, 100..120, 150..180, 210..350]), [1, 2, 3, 4]);
        assert_eq!(unchanged(&record, 6, &[0..120, 150..181, 210..350]), [1, 0, 3, 4]);
        assert_eq!(unchanged(&record, 6, &[0..120, 210..350]), [1, 0, 3, 4]);
        assert_eq!(unchanged(&record, 6, &[0..120, 150..180, 205..350]), [1, 2, 0, 4]);
        assert_eq!(unchanged(&record, 6, &[]), [0; 4]);
    }

    #[test]
    fn a_range_has_to_be_a_chunk() {
        let chunks = committed().unchanged_in(Some(5)).expect("committed");
        for range in [0..99, 1..100, 0..101, 0..200, 100..150, 300..349, 350..450, 0..0] {
            assert_eq!(chunks.chunk(&range, WHOLE), None, "{range:?}");
        }
        assert_eq!(chunks.chunk(&(300..350), WHOLE), Some(id(4)));
    }

    /// A store of version 1 has no chunks.
    #[test]
    fn a_file_without_chunks_has_no_unchanged_chunks() {
        let mut record = CaptureHistory::default();
        capture(&mut record, 5, &[0..350]);
        record.record_commit(Some(5), vec![0..350], &DataFile { chunks: Vec::new(), ..file() }, stored());
        capture(&mut record, 6, &[]);
        assert_eq!(unchanged(&record, 6, WHOLE), [0; 4]);
    }

    #[test]
    fn adjacent_and_overlapping_ranges_are_merged() {
        assert_eq!(merge_ranges(vec![7..9, 0..2, 2..3, 5..5, 8..12, 20..21]), [0..3, 5..5, 7..12, 20..21]);
    }
}
