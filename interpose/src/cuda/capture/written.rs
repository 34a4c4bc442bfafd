//! The ranges of the mirror that a capture has written, in bounded number.

use std::ops::Range;

use super::hash::CHUNK_BYTES;

/// The maximum number of ranges that are reported.
const MOST: usize = 4096;

/// The ranges in order, joined where they meet. If there are too many, smaller gaps are reported as written too: they
/// begin and end at multiples of ever longer steps.
pub(crate) fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut joined = join(ranges);
    let mut step = CHUNK_BYTES;
    while joined.len() > MOST {
        step *= 2;
        let widened = |range: Range<u64>| range.start / step * step..range.end.next_multiple_of(step);
        joined = join(joined.into_iter().map(widened).collect());
    }
    joined
}

fn join(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_meets_is_joined() {
        assert_eq!(joined(vec![7..9, 0..2, 2..3, 5..5, 8..8, 8..12, 20..21]), [0..3, 7..12, 20..21]);
        assert_eq!(joined(Vec::new()), []);
    }

    /// Every second chunk of 128 GiB.
    #[test]
    fn nothing_is_left_out_where_there_is_too_much_to_tell() {
        let all: Vec<_> = (0..32 << 10).map(|chunk| chunk * 2 * CHUNK_BYTES).collect();
        let told = joined(all.iter().map(|start| *start..start + CHUNK_BYTES).collect());
        assert!(told.len() <= MOST, "{}", told.len());
        let is_told =
            |start: u64| told.iter().any(|range| range.start <= start && start + CHUNK_BYTES <= range.end);
        assert!(all.into_iter().all(is_told));
        // A few far apart stay few.
        let few = [0, 1 << 30, 1 << 36].map(|start| start..start + CHUNK_BYTES);
        assert_eq!(joined(few.to_vec()), few);
    }
}
