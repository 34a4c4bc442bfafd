//! Ranges of the mirror.

use std::ops::Range;

use super::hash::CHUNK_BYTES;

/// The maximum number of ranges that are reported, or pinned.
const MOST: usize = 4096;

/// The ranges in order, joined where they meet. If there are too many, smaller gaps are covered too: they begin and end
/// at multiples of ever longer steps.
pub(crate) fn bounded(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut joined = joined(ranges);
    let mut step = CHUNK_BYTES;
    while joined.len() > MOST {
        step *= 2;
        let widened = |range: Range<u64>| range.start / step * step..range.end.next_multiple_of(step);
        joined = self::joined(joined.into_iter().map(widened).collect());
    }
    joined
}

/// The ranges in order, joined where they meet.
pub(crate) fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
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

/// The parts of ranges that do not lie in others; both are sorted, without overlaps.
pub(crate) fn without(ranges: &[Range<u64>], others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    for range in ranges {
        let mut start = range.start;
        let first = others.partition_point(|other| other.end <= start);
        for other in others.iter().skip(first).take_while(|other| other.start < range.end) {
            if start < other.start {
                left.push(start..other.start);
            }
            start = start.max(other.end);
        }
        if start < range.end {
            left.push(start..range.end);
        }
    }
    left
}

/// The parts of ranges that lie in others; both are sorted, without overlaps.
pub(crate) fn within(ranges: &[Range<u64>], others: &[Range<u64>]) -> Vec<Range<u64>> {
    without(ranges, &without(ranges, others))
}

/// How many bytes ranges without overlaps have.
pub(crate) fn total_bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_meets_is_joined() {
        assert_eq!(joined(vec![7..9, 0..2, 2..3, 5..5, 8..8, 8..12, 20..21]), [0..3, 7..12, 20..21]);
        assert_eq!(joined(Vec::new()), []);
    }

    #[test]
    fn what_lies_in_others_is_left_out() {
        let others = [2..4, 6..8, 10..20];
        let left = |ranges: &[Range<u64>]| without(ranges, &others);
        assert_eq!(left(&[0..12]), [0..2, 4..6, 8..10]);
        assert_eq!(left(&[0..1, 3..7, 20..30]), [0..1, 4..6, 20..30]);
        assert_eq!(left(&[2..4, 11..13, 5..5]), []);
        assert_eq!(without(&[1..3], &[]), [1..3]);
        assert_eq!(within(&[0..12], &others), [2..4, 6..8, 10..12]);
        assert_eq!(total_bytes(&left(&[0..12])), 6);
    }

    /// Every second chunk of 128 GiB.
    #[test]
    fn nothing_is_left_out_where_there_is_too_much_to_tell() {
        let all: Vec<_> = (0..32 << 10).map(|chunk| chunk * 2 * CHUNK_BYTES).collect();
        let told = bounded(all.iter().map(|start| *start..start + CHUNK_BYTES).collect());
        assert!(told.len() <= MOST, "{}", told.len());
        let is_told =
            |start: u64| told.iter().any(|range| range.start <= start && start + CHUNK_BYTES <= range.end);
        assert!(all.into_iter().all(is_told));
        // A few far apart stay few.
        let few = [0, 1 << 30, 1 << 36].map(|start| start..start + CHUNK_BYTES);
        assert_eq!(bounded(few.to_vec()), few);
    }
}
