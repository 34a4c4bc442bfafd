//! `pagemap-*.img`: which pages of a process are in `pages-N.img`, and in what order. Field numbers and flags are those of
//! CRIU's images/pagemap.proto.

use super::images::next_entry;
use prost::Message;
use std::ops::Range;

/// First words of the image.
const MAGIC: [u8; 8] = {
    let (common, own) = (0x5456_4319_u32.to_le_bytes(), 0x5608_4025_u32.to_le_bytes());
    [common[0], common[1], common[2], common[3], own[0], own[1], own[2], own[3]]
};
/// The page is in an older image.
const IN_PARENT: u32 = 1;
/// The page is in this image.
const PRESENT: u32 = 1 << 2;
const PAGE_BYTES: u64 = 4096;

#[derive(Message)]
struct Head {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

#[derive(Message)]
struct Entry {
    #[prost(uint64, required, tag = "1")]
    address: u64,
    /// Used up to CRIU 4.1.
    #[prost(uint32, optional, tag = "2")]
    pages_32: Option<u32>,
    #[prost(bool, optional, tag = "3")]
    in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pages: Option<u64>,
}

/// The content of an image of pages, in order.
#[derive(Debug, PartialEq, Eq)]
pub struct Pagemap {
    /// The number in the name of `pages-N.img`.
    pub pages_id: u32,
    /// Addresses, or offsets in a segment of shared memory.
    pub runs: Vec<Range<u64>>,
}

impl Pagemap {
    /// Parses an image; `None` if it is not a pagemap.
    #[must_use]
    pub fn parse(image: &[u8]) -> Option<Self> {
        let mut rest = image.strip_prefix(&MAGIC)?;
        let Head { pages_id } = next_entry(&mut rest)?.ok()?;
        let mut runs: Vec<Range<u64>> = Vec::new();
        while let Some(entry) = next_entry::<Entry>(&mut rest) {
            let entry = entry.ok()?;
            let pages = entry.pages.or(entry.pages_32.map(u64::from))?;
            let in_parent = entry.in_parent.unwrap_or(false);
            let flags = entry.flags.unwrap_or(if in_parent { IN_PARENT } else { PRESENT });
            let end = entry.address.checked_add(pages.checked_mul(PAGE_BYTES)?)?;
            match runs.last_mut() {
                _ if flags & PRESENT == 0 => {}
                Some(last) if last.end == entry.address => last.end = end,
                _ => runs.push(entry.address..end),
            }
        }
        rest.is_empty().then_some(Self { pages_id, runs })
    }
}

/// Window sizes by image size: (image smaller than, window), in bytes. Chunk boundaries are at multiples of the window in
/// the address space. Changes in a heap are scattered, and every changed chunk is stored as a whole, so small chunks
/// deduplicate better; large images need larger chunks to limit their number.
///
/// There are few steps, far apart: an image that grows beyond one is stored as a whole once.
const WINDOWS: [(u64, u64); 3] = [(8 << 30, 64 << 10), (64 << 30, 512 << 10), (u64::MAX, 4 << 20)];
/// The least size of a chunk, unless a large run follows.
const SMALL_BYTES: u64 = 64 << 10;
/// A run of at least this length begins a new chunk.
const LARGE_BYTES: u64 = 128 << 10;

fn window_bytes(runs: &[Range<u64>]) -> u64 {
    let image_bytes: u64 = runs.iter().map(|run| run.end - run.start).sum();
    let found = WINDOWS.iter().find(|(below, _)| image_bytes < *below);
    found.map_or(WINDOWS[0].1, |(_, window_bytes)| *window_bytes)
}

/// The ends of the chunks of an image of pages. Unchanged memory gets the same chunks again even if more pages precede it
/// in the image: boundaries are at multiples of the window in the address space, and before each large run. Small runs
/// share a chunk.
#[must_use]
pub fn chunk_ends(runs: &[Range<u64>]) -> Vec<u64> {
    let mut ends = Vec::new();
    // Offsets in the image: start of the current chunk, current position.
    let (mut began, mut position) = (0, 0);
    let window_bytes = window_bytes(runs);
    for run in runs {
        let mut address = run.start;
        let is_large = run.end - run.start >= LARGE_BYTES;
        while address < run.end {
            let next = run.end.min((address / window_bytes + 1) * window_bytes);
            let chunk_bytes = position - began;
            if chunk_bytes > 0 && (is_large || chunk_bytes >= SMALL_BYTES) {
                ends.push(position);
                began = position;
            }
            position += next - address;
            address = next;
        }
    }
    if position > began {
        ends.push(position);
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const MIB: u64 = 1 << 20;

    fn image(runs: &[(u64, u64, u32)]) -> Vec<u8> {
        let mut image = MAGIC.to_vec();
        let mut add = |body: Vec<u8>| {
            image.extend_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
            image.extend(body);
        };
        add(Head { pages_id: 7 }.encode_to_vec());
        for &(address, pages, flags) in runs {
            let entry =
                Entry { address, pages_32: None, in_parent: None, flags: Some(flags), pages: Some(pages) };
            add(entry.encode_to_vec());
        }
        image
    }

    #[test]
    fn only_pages_in_the_image_are_listed() {
        let read = Pagemap::parse(&image(&[(0x1000, 2, 4), (0x3000, 1, 6), (0x8000, 5, 1), (0x9000, 1, 4)]));
        let read = read.unwrap();
        assert_eq!(read.pages_id, 7);
        assert_eq!(read.runs, [0x1000..0x4000, 0x9000..0xa000]);
    }

    #[test]
    fn any_pagemap_is_read_or_refused() {
        let samples =
            [image(&[(0x1000, 2, 4), (0x3000, 1, 6), (0x8000, 5, 1)]), image(&[(0x9000, 1 << 20, 4)])];
        ckpt_test_mutate::mutations(&samples, |bytes| {
            if let Some(read) = Pagemap::parse(bytes) {
                let bytes: u64 = read.runs.iter().map(|run| run.end - run.start).sum();
                // The list of chunks is as long as what the image claims.
                if bytes < 1 << 40 {
                    let _ = chunk_ends(&read.runs);
                }
            }
        });
    }

    #[test]
    fn truncated_and_invalid_images_are_refused() {
        let whole = image(&[(0x1000, 2, 4), (0x8000, 5, 4)]);
        assert!(Pagemap::parse(&whole).is_some());
        for length in 0..whole.len() {
            let cut = Pagemap::parse(&whole[..length]);
            assert!(cut.is_none_or(|cut| cut.runs.len() < 2), "{length}");
        }
        assert!(Pagemap::parse(&image(&[(0x1000, u64::MAX, 4)])).is_none());
    }

    /// The chunks that `chunk_ends` makes, by address.
    fn chunks(runs: &[Range<u64>]) -> BTreeSet<Vec<(u64, u64)>> {
        let mut ends = chunk_ends(runs).into_iter();
        let (mut position, mut all, mut chunk) = (0, BTreeSet::new(), Vec::new());
        let mut end = ends.next().unwrap();
        for run in runs {
            let mut address = run.start;
            while address < run.end {
                let next = run.end.min(address + (end - position));
                chunk.push((address, next));
                position += next - address;
                address = next;
                if position == end {
                    all.insert(std::mem::take(&mut chunk));
                    end = ends.next().unwrap_or(u64::MAX);
                }
            }
        }
        assert!(chunk.is_empty() && end == u64::MAX, "the last chunk does not end where the image ends");
        all
    }

    fn bytes(chunk: &[(u64, u64)]) -> u64 {
        chunk.iter().map(|(start, end)| end - start).sum()
    }

    /// Bytes in chunks that did not exist before.
    fn new_bytes(before: &[Range<u64>], after: &[Range<u64>]) -> u64 {
        chunks(after).difference(&chunks(before)).map(|chunk| bytes(chunk)).sum()
    }

    const BASE: u64 = 0x7f00_0000_0000;

    #[test]
    fn inserted_and_removed_pages_change_few_chunks() {
        let large = |first: u64, pages: Range<u64>| {
            let small = 0x40_0000..0x40_0000 + first * PAGE_BYTES;
            let hole = BASE + pages.start * PAGE_BYTES..BASE + pages.end * PAGE_BYTES;
            vec![small, BASE..hole.start, hole.end..BASE + 600 * MIB, BASE + 1000 * MIB..BASE + 1010 * MIB]
        };
        let whole = large(3, 5000..5000);
        assert_eq!(new_bytes(&whole, &whole), 0);
        assert!(new_bytes(&whole, &large(10, 5000..5000)) < 128 << 10, "a small run has grown");
        assert!(new_bytes(&whole, &large(3, 5000..5001)) <= 64 << 10, "a page was removed");
        assert!(new_bytes(&large(3, 5000..5001), &whole) <= 64 << 10, "the page was added again");
        for length in [16 * MIB, 64 * MIB, 1024 * MIB, 4096 * MIB] {
            let run = |bytes: u64| BASE..BASE + bytes;
            let new = new_bytes(&[run(length - PAGE_BYTES)], &[run(length + PAGE_BYTES)]);
            assert!(new <= 128 << 10, "{length} grows: {new}");
        }
    }

    #[test]
    fn small_runs_share_chunks() {
        let runs: Vec<_> = (0..1000).map(|number| number * 8 * MIB..number * 8 * MIB + PAGE_BYTES).collect();
        let ends = chunk_ends(&runs);
        assert_eq!(*ends.last().unwrap(), 1000 * PAGE_BYTES);
        assert_eq!(ends.len(), 1000_usize.div_ceil(16));
    }

    #[test]
    fn chunk_size_depends_on_image_size() {
        let all_and_longest = |image_bytes: u64| {
            let odd = BASE + 3 * PAGE_BYTES;
            let chunks = chunks(std::slice::from_ref(&(odd..odd + image_bytes)));
            (chunks.len(), chunks.iter().map(|chunk| bytes(chunk)).max().unwrap())
        };
        assert_eq!(all_and_longest(PAGE_BYTES), (1, PAGE_BYTES));
        assert_eq!(all_and_longest(22 * MIB), (353, 64 << 10));
        assert_eq!(all_and_longest(10_240 * MIB), (20_481, 512 << 10));
        assert_eq!(all_and_longest(102_400 * MIB), (25_601, 4 * MIB));
        // The longest shared chunk: less than the least chunk size, plus a run that is not large.
        let runs = [BASE..BASE + 60 * 1024, BASE + MIB..BASE + MIB + 124 * 1024];
        assert!(chunks(&runs).iter().all(|chunk| bytes(chunk) <= 188 << 10), "{:?}", chunks(&runs));
        assert_eq!(chunk_ends(&[]), [0; 0]);
    }
}
