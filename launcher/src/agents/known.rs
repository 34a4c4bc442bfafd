//! What of a mirror is in the store already, as far as that is known without reading the mirror.
//!
//! With each capture an agent says where in the mirror it has written. Where nothing was written since the mirror's
//! content was committed, it still is what was committed, chunk by chunk:
//!
//! ```text
//!   capture 7 ──► stored, committed: these chunks
//!   capture 8 ──► its save fails                     | written by 8
//!   capture 9 ──► is to be stored                    v or by 9: read. All else: the chunks of capture 7
//! ```
//!
//! # Why that is so
//! Only captures write to a mirror that has content:
//!
//! - The process has it mapped from its staging on. Of what the interposer does then, only a capture writes
//!   (`interpose/src/cuda/capture`), the trial whether hashing is worth the while included, which is a part of one. What
//!   is brought back is read from it. Children of a fork do not have it mapped, nor has another program.
//! - The launcher reads it for the store, hands it out, and changes its size. What it grows by has no content, and what
//!   comes to lie there is new to the capture, which writes it. Where it is cut, nothing is known any more.
//! - A resume fills a mirror of its own, of which nothing is known.
//!
//! Each capture that is begun has a number, which is by one higher than that of the one before, in the life of a
//! process; what a resumed process had counted is about a mirror that is gone. So if no number is missing since the
//! commit, no capture is. One is missing if its attempt failed in the process, or if the launcher was not told.
//!
//! A store is asked for the chunks by their names: one that does not have them (any more) has the mirror read. So it
//! does not matter whether the snapshot that was committed is still there, and in which tier.

use std::ops::Range;
use std::sync::Arc;

use ckpt_protocol::agent::Capture;
use ckpt_snapshot::DataFile;
use ckpt_snapshot::chunk::ChunkId;

/// What is known of one mirror.
#[derive(Debug, Default)]
pub struct Record {
    /// The number of the newest capture that was told of.
    newest: Option<u64>,
    committed: Option<Known>,
}

/// Content of a mirror that was committed, and where it was written to since.
#[derive(Debug, Clone)]
pub struct Known {
    committed: Arc<Committed>,
    /// In order, without overlaps.
    written: Vec<Range<u64>>,
}

#[derive(Debug)]
struct Committed {
    /// Where in the mirror something lay: in order, without overlaps. All else was stored as zeroes.
    extents: Vec<Range<u64>>,
    /// Where each chunk ends (bytes), and its name.
    chunks: Vec<(u64, ChunkId)>,
}

impl Record {
    /// Takes what an agent says of a capture; `None` where it does not say.
    pub fn captured(&mut self, capture: Option<&Capture>) {
        let follows = |capture: &&Capture| {
            self.newest.is_some_and(|newest| newest.checked_add(1) == Some(capture.number))
        };
        match (capture.filter(follows), &mut self.committed) {
            (Some(capture), Some(known)) => {
                known.written.extend(capture.written.iter().cloned());
                known.written = joined(std::mem::take(&mut known.written));
            }
            _ => self.committed = None,
        }
        self.newest = capture.map(|capture| capture.number);
    }

    /// What is known of the mirror as the capture with this number has left it.
    pub fn of(&self, capture: Option<u64>) -> Option<Known> {
        let is_newest = capture.is_some() && capture == self.newest;
        if is_newest { self.committed.clone() } else { None }
    }

    /// What the capture with this number has left in the mirror is committed: `file`, made of what lies at `extents`.
    pub fn committed(&mut self, capture: Option<u64>, extents: Vec<Range<u64>>, file: &DataFile) {
        if capture.is_none() || capture != self.newest {
            return;
        }
        let mut end = 0;
        let chunks = file.chunks.iter().map(|chunk| {
            end += u64::from(chunk.bytes);
            (end, chunk.id)
        });
        let committed = Arc::new(Committed { extents, chunks: chunks.collect() });
        self.committed = Some(Known { committed, written: Vec::new() });
    }
}

impl Known {
    /// The chunk that a range of the content is, if that is known; something lies at `extents` now.
    pub fn chunk(&self, range: &Range<u64>, extents: &[Range<u64>]) -> Option<ChunkId> {
        let Committed { extents: before, chunks } = &*self.committed;
        let number = chunks.partition_point(|(end, _)| *end <= range.start);
        let (end, id) = chunks.get(number)?;
        let start = number.checked_sub(1).map_or(0, |previous| chunks[previous].0);
        let is_chunk = (start..*end) == *range;
        let is_as_it_was =
            parts(&self.written, range).next().is_none() && parts(before, range).eq(parts(extents, range));
        (is_chunk && is_as_it_was).then_some(*id)
    }
}

/// What of `all` lies in a range.
fn parts<'a>(all: &'a [Range<u64>], range: &'a Range<u64>) -> impl Iterator<Item = Range<u64>> + 'a {
    let first = all.partition_point(|one| one.end <= range.start);
    let meets = all.get(first..).unwrap_or_default().iter().take_while(|one| one.start < range.end);
    meets.map(|one| one.start.max(range.start)..one.end.min(range.end))
}

/// The ranges in order, those that meet or overlap made one.
pub fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one range is meant")]
mod tests {
    use ckpt_snapshot::RelPath;
    use ckpt_snapshot::chunk::Chunk;

    use super::*;

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

    fn captured(record: &mut Record, number: u64, written: &[Range<u64>]) {
        record.captured(Some(&Capture { mirror: 7, number, written: written.to_vec() }));
    }

    /// Everything was captured and committed by capture 5.
    fn committed() -> Record {
        let mut record = Record::default();
        captured(&mut record, 5, &[0..350]);
        record.committed(Some(5), vec![0..350], &file());
        record
    }

    /// The chunks that are known after a capture, by number; 0 for one that is not.
    fn known(record: &Record, capture: u64, extents: &[Range<u64>]) -> [u8; 4] {
        let known = record.of(Some(capture));
        [0..100, 100..200, 200..300, 300..350].map(|range| {
            known.as_ref().and_then(|known| known.chunk(&range, extents)).map_or(0, |ChunkId(id)| id[0])
        })
    }

    const WHOLE: &[Range<u64>] = &[0..350];

    #[test]
    fn what_was_not_written_is_what_was_committed() {
        let mut record = committed();
        captured(&mut record, 6, &[]);
        assert_eq!(known(&record, 6, WHOLE), [1, 2, 3, 4]);
        // One byte at either end.
        captured(&mut record, 7, &[99..100, 300..301]);
        assert_eq!(known(&record, 7, WHOLE), [0, 2, 3, 0]);
        // As long as nothing is committed, it adds up.
        captured(&mut record, 8, &[150..160]);
        assert_eq!(known(&record, 8, WHOLE), [0, 0, 3, 0]);
        record.committed(Some(8), vec![0..350], &file());
        captured(&mut record, 9, &[250..260]);
        assert_eq!(known(&record, 9, WHOLE), [1, 2, 0, 4]);
    }

    #[test]
    fn a_capture_that_is_missing_takes_all_with_it() {
        for (number, why) in
            [(7, "one is missing"), (5, "it has come again"), (1, "begun anew"), (0, "nonsense")]
        {
            let mut record = committed();
            captured(&mut record, number, &[]);
            assert_eq!(known(&record, number, WHOLE), [0; 4], "{why}");
            captured(&mut record, number + 1, &[]);
            assert_eq!(known(&record, number + 1, WHOLE), [0; 4], "{why}, and the next");
        }
        let mut record = committed();
        record.captured(None);
        captured(&mut record, 6, &[]);
        assert_eq!(known(&record, 6, WHOLE), [0; 4], "somebody has not told");
        let mut first = Record::default();
        captured(&mut first, 1, &[]);
        assert_eq!(known(&first, 1, WHOLE), [0; 4], "nothing was committed");
        let mut last = Record::default();
        captured(&mut last, u64::MAX, &[]);
        last.committed(Some(u64::MAX), vec![0..350], &file());
        captured(&mut last, 0, &[]);
        assert_eq!(known(&last, 0, WHOLE), [0; 4]);
    }

    #[test]
    fn only_the_newest_capture_is_known_and_committed() {
        let mut record = committed();
        captured(&mut record, 6, &[]);
        assert_eq!(known(&record, 5, WHOLE), [0; 4]);
        assert!(record.of(None).is_none());
        let mut record = Record::default();
        captured(&mut record, 5, &[0..350]);
        captured(&mut record, 6, &[0..350]);
        record.committed(Some(5), vec![0..350], &file());
        record.committed(None, vec![0..350], &file());
        captured(&mut record, 7, &[]);
        assert_eq!(known(&record, 7, WHOLE), [0; 4]);
    }

    #[test]
    fn what_lies_there_has_to_lie_where_it_did() {
        let mut record = Record::default();
        captured(&mut record, 5, &[0..350]);
        record.committed(Some(5), vec![0..120, 150..180, 210..350], &file());
        captured(&mut record, 6, &[]);
        assert_eq!(known(&record, 6, &[0..120, 150..180, 210..350]), [1, 2, 3, 4]);
        assert_eq!(known(&record, 6, &[0..100, 100..120, 150..180, 210..350]), [1, 2, 3, 4]);
        assert_eq!(known(&record, 6, &[0..120, 150..181, 210..350]), [1, 0, 3, 4]);
        assert_eq!(known(&record, 6, &[0..120, 210..350]), [1, 0, 3, 4]);
        assert_eq!(known(&record, 6, &[0..120, 150..180, 205..350]), [1, 2, 0, 4]);
        assert_eq!(known(&record, 6, &[]), [0; 4]);
    }

    #[test]
    fn a_range_has_to_be_a_chunk() {
        let known = committed().of(Some(5)).expect("known");
        for range in [0..99, 1..100, 0..101, 0..200, 100..150, 300..349, 350..450, 0..0] {
            assert_eq!(known.chunk(&range, WHOLE), None, "{range:?}");
        }
        assert_eq!(known.chunk(&(300..350), WHOLE), Some(id(4)));
    }

    /// A store of version 1 has no chunks.
    #[test]
    fn a_file_without_chunks_tells_nothing() {
        let mut record = Record::default();
        captured(&mut record, 5, &[0..350]);
        record.committed(Some(5), vec![0..350], &DataFile { chunks: Vec::new(), ..file() });
        captured(&mut record, 6, &[]);
        assert_eq!(known(&record, 6, WHOLE), [0; 4]);
    }

    #[test]
    fn what_meets_is_joined() {
        assert_eq!(joined(vec![7..9, 0..2, 2..3, 5..5, 8..12, 20..21]), [0..3, 5..5, 7..12, 20..21]);
    }
}
