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

#[derive(Clone, Message)]
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

impl Entry {
    fn kind(&self) -> u32 {
        let in_parent = self.in_parent.unwrap_or(false);
        self.flags.unwrap_or(if in_parent { IN_PARENT } else { PRESENT })
    }

    /// Pages in the image; `None` if there are too many for CRIU.
    fn present(range: &Range<u64>) -> Option<Self> {
        let pages = (range.end - range.start) / PAGE_BYTES;
        let pages_32 = Some(u32::try_from(pages).ok()?);
        Some(Self {
            address: range.start,
            pages_32,
            in_parent: None,
            flags: Some(PRESENT),
            pages: Some(pages),
        })
    }

    /// Its addresses; `None` if they are not valid.
    fn range(&self) -> Option<Range<u64>> {
        let pages = self.pages.or(self.pages_32.map(u64::from))?;
        let end = self.address.checked_add(pages.checked_mul(PAGE_BYTES)?)?;
        Some(self.address..end)
    }
}

/// Calls `each` for every entry of an image, and returns the number of the image of pages. `None` if it is not a pagemap.
fn entries(image: &[u8], mut each: impl FnMut(Entry, Range<u64>)) -> Option<u32> {
    let mut rest = image.strip_prefix(&MAGIC)?;
    let Head { pages_id } = next_entry(&mut rest)?.ok()?;
    while let Some(entry) = next_entry::<Entry>(&mut rest) {
        let entry = entry.ok()?;
        let range = entry.range()?;
        each(entry, range);
    }
    rest.is_empty().then_some(pages_id)
}

/// Pages of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageEntry {
    /// Their addresses.
    pub range: Range<u64>,
    /// Whether the image of pages has them.
    pub is_present: bool,
    flags: u32,
}

impl PageEntry {
    /// An entry for a part of these pages.
    #[must_use]
    pub fn part(&self, range: Range<u64>) -> Self {
        Self { range, ..self.clone() }
    }

    #[cfg(test)]
    pub fn new(range: Range<u64>, is_present: bool) -> Self {
        Self { range, is_present, flags: if is_present { PRESENT } else { 0 } }
    }
}

/// All entries of a pagemap.
#[derive(Debug, PartialEq, Eq)]
pub struct Pages {
    /// The number in the name of `pages-N.img`.
    pub pages_id: u32,
    /// In the order of the image of pages.
    pub entries: Vec<PageEntry>,
}

impl Pages {
    /// Parses an image; `None` if it is not a pagemap.
    #[must_use]
    pub fn parse(image: &[u8]) -> Option<Self> {
        let mut found = Vec::new();
        let pages_id = entries(image, |entry, range| {
            let flags = entry.kind();
            found.push(PageEntry { range, is_present: flags & PRESENT != 0, flags });
        })?;
        Some(Self { pages_id, entries: found })
    }

    /// The image with these entries; `None` if one has too many pages for CRIU.
    #[must_use]
    pub fn image(&self) -> Option<Vec<u8>> {
        let one = |page: &PageEntry| Some(Entry { flags: Some(page.flags), ..Entry::present(&page.range)? });
        let all: Option<Vec<_>> = self.entries.iter().map(one).collect();
        image(self.pages_id, all?.into_iter())
    }
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
        let mut runs: Vec<Range<u64>> = Vec::new();
        let pages_id = entries(image, |entry, range| match runs.last_mut() {
            _ if entry.kind() & PRESENT == 0 => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => runs.push(range),
        })?;
        Some(Self { pages_id, runs })
    }
}

/// Consecutive pages in an image of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which dump has them: 0 is the newest, each further one is the parent of the one before it.
    pub dump: usize,
    /// Where they begin in its image of pages.
    pub offset: u64,
    /// Their length.
    pub bytes: u64,
}

/// A pagemap without references to older dumps, and where its pages are.
#[derive(Debug, PartialEq, Eq)]
pub struct Merged {
    /// The image, to take the place of the newest dump's.
    pub image: Vec<u8>,
    /// The numbers of CRIU's images of pages, by dump.
    pub pages_ids: Vec<u32>,
    /// Its pages, in order. Their images are those of the dumps.
    pub pieces: Vec<Piece>,
}

/// Addresses, with the place in the image of pages; `None` for pages of an older dump.
type Placed = Vec<(Range<u64>, Option<u64>)>;

impl Merged {
    /// Merges the pagemaps of a process, the newest dump's first. `None` if one cannot be parsed, or a page is nowhere.
    #[must_use]
    pub fn of(images: &[Vec<u8>]) -> Option<Self> {
        let (mut pages_ids, mut dumps, mut newest) = (Vec::new(), Vec::<Placed>::new(), Vec::new());
        for (dump, image) in images.iter().enumerate() {
            let (mut offset, mut placed) = (0_u64, Placed::new());
            pages_ids.push(entries(image, |entry, range| {
                let is_present = entry.kind() & PRESENT != 0;
                placed.push((range.clone(), is_present.then_some(offset)));
                if is_present {
                    offset = offset.saturating_add(range.end - range.start);
                }
                if dump == 0 {
                    newest.push(entry);
                }
            })?);
            dumps.push(placed);
        }
        // Lookups need addresses in order; CRIU writes them so.
        if dumps.iter().any(|dump| !dump.is_sorted_by(|one, next| one.0.end <= next.0.start)) {
            return None;
        }
        let mut pieces = Vec::new();
        for (range, _) in dumps.first()? {
            place(&dumps, 0, range.clone(), &mut pieces)?;
        }
        let all = newest.into_iter().map(|entry| {
            let flags = Some(entry.kind() & !IN_PARENT | PRESENT);
            Entry { flags, in_parent: None, ..entry }
        });
        Some(Self { image: image(*pages_ids.first()?, all)?, pages_ids, pieces })
    }

    /// Adds pages that CRIU has left out to the pagemap of a process: ranges of addresses, in order. They are one after the
    /// other in another file: number 1 in the pieces. `None` if the pagemap cannot be parsed, refers to an older dump, or
    /// has one of these pages.
    #[must_use]
    pub fn with_copied(pagemap: &[u8], copied: &[Range<u64>]) -> Option<Self> {
        let mut all: Vec<(Entry, Range<u64>, usize)> = Vec::new();
        let pages_id = entries(pagemap, |entry, range| all.push((entry, range, 0)))?;
        if all.iter().any(|(entry, ..)| entry.kind() & (PRESENT | IN_PARENT) != PRESENT) {
            return None;
        }
        // They are in this order in CRIU's image.
        if !all.is_sorted_by(|one, next| one.1.end <= next.1.start) {
            return None;
        }
        for range in copied {
            all.push((Entry::present(range)?, range.clone(), 1));
        }
        all.sort_by_key(|(_, range, _)| range.start);
        if !all.is_sorted_by(|one, next| one.1.end <= next.1.start) {
            return None;
        }
        let mut offsets = [0; 2];
        let mut pieces: Vec<Piece> = Vec::new();
        for (_, range, dump) in &all {
            let bytes = range.end - range.start;
            match pieces.last_mut() {
                Some(last) if last.dump == *dump => last.bytes += bytes,
                _ => pieces.push(Piece { dump: *dump, offset: offsets[*dump], bytes }),
            }
            offsets[*dump] += bytes;
        }
        let image = image(pages_id, all.into_iter().map(|(entry, ..)| entry))?;
        Some(Self { image, pages_ids: vec![pages_id], pieces })
    }
}

/// The image with these entries.
fn image(pages_id: u32, entries: impl Iterator<Item = Entry>) -> Option<Vec<u8>> {
    let mut image = MAGIC.to_vec();
    let bodies = entries.map(|entry| entry.encode_to_vec());
    for body in std::iter::once(Head { pages_id }.encode_to_vec()).chain(bodies) {
        image.extend_from_slice(&u32::try_from(body.len()).ok()?.to_le_bytes());
        image.extend(body);
    }
    Some(image)
}

/// Appends the places of the pages at `wanted`, as `dump` and its parents have them. `None` if one has no place.
fn place(dumps: &[Placed], dump: usize, mut wanted: Range<u64>, pieces: &mut Vec<Piece>) -> Option<()> {
    let placed = dumps.get(dump)?;
    while !wanted.is_empty() {
        let next = placed.partition_point(|(range, _)| range.end <= wanted.start);
        let (range, offset) = placed.get(next).filter(|(range, _)| range.start <= wanted.start)?;
        let end = wanted.end.min(range.end);
        let bytes = end - wanted.start;
        match (offset, pieces.last_mut()) {
            (None, _) => place(dumps, dump + 1, wanted.start..end, pieces)?,
            (Some(offset), last) => {
                let offset = offset.checked_add(wanted.start - range.start)?;
                match last {
                    Some(last) if last.dump == dump && last.offset + last.bytes == offset => {
                        last.bytes += bytes;
                    }
                    _ => pieces.push(Piece { dump, offset, bytes }),
                }
            }
        }
        wanted.start = end;
    }
    Some(())
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
    fn pages_of_older_dumps_are_found() {
        const BOTH: u32 = IN_PARENT | PRESENT;
        let oldest = image(&[(0x1000, 8, 4), (0x20000, 1, 4)]);
        let middle = image(&[(0x1000, 2, 1), (0x3000, 1, 4), (0x4000, 2, 1), (0x6000, 1, 4)]);
        let newest = image(&[(0x1000, 1, 4), (0x2000, 5, 1), (0x20000, 1, 4)]);
        let piece =
            |dump, page: u64, pages| Piece { dump, offset: page * PAGE_BYTES, bytes: pages * PAGE_BYTES };
        let merged = Merged::of(&[newest.clone(), middle.clone(), oldest.clone()]).unwrap();
        let expected = [(0, 0, 1), (2, 1, 1), (1, 0, 1), (2, 3, 2), (1, 1, 1), (0, 1, 1)];
        assert_eq!(merged.pieces, expected.map(|(dump, page, pages)| piece(dump, page, pages)));
        assert_eq!(merged.pages_ids, [7, 7, 7]);
        let read = Pagemap::parse(&merged.image).unwrap();
        assert_eq!(read.runs, [0x1000..0x7000, 0x20000..0x21000]);
        entries(&merged.image, |entry, _| assert_eq!(entry.kind() & BOTH, PRESENT)).unwrap();
        // A dump without a parent is as it was.
        assert_eq!(Merged::of(std::slice::from_ref(&oldest)).unwrap().image, oldest);
        assert_eq!(Merged::of(&[newest.clone(), middle]), None, "the oldest is missing");
        assert_eq!(Merged::of(&[newest, image(&[(0x2000, 4, 4)])]), None, "a page is missing");
        assert_eq!(Merged::of(&[image(&[(0x9000, 1, 4), (0x1000, 1, 4)])]), None, "not in order");
    }

    #[test]
    fn copied_pages_are_added() {
        let of_criu = image(&[(0x1000, 2, 4), (0x9000, 1, 6)]);
        let merged =
            Merged::with_copied(&of_criu, &[0x3000..0x5000, 0x7000..0x8000, 0xa000..0xb000]).unwrap();
        let piece = |dump, page, pages| Piece { dump, offset: page * PAGE_BYTES, bytes: pages * PAGE_BYTES };
        assert_eq!(merged.pieces, [piece(0, 0, 2), piece(1, 0, 3), piece(0, 2, 1), piece(1, 3, 1)]);
        assert_eq!(
            (merged.pages_ids, Merged::with_copied(&of_criu, &[]).unwrap().image),
            (vec![7], of_criu.clone())
        );
        assert_eq!(
            Pagemap::parse(&merged.image).unwrap().runs,
            [0x1000..0x5000, 0x7000..0x8000, 0x9000..0xb000]
        );
        let pages = Pages::parse(&merged.image).unwrap();
        assert_eq!((pages.entries.len(), Pages::parse(&pages.image().unwrap()).unwrap()), (5, pages));
        assert_eq!(Merged::with_copied(&of_criu, &[0x2000..0x4000]), None, "a page is there twice");
        assert_eq!(Merged::with_copied(&image(&[(0x1000, 1, 1)]), &[]), None, "a page is in an older dump");
        assert_eq!(Merged::with_copied(&image(&[(0x9000, 1, 4), (0x1000, 1, 4)]), &[]), None, "not in order");
    }

    #[test]
    fn any_pagemap_is_completed_or_refused() {
        ckpt_test_mutate::mutations(&[image(&[(0x1000, 2, 4), (0x9000, 1, 6)])], |bytes| {
            if let Some(merged) = Merged::with_copied(bytes, std::slice::from_ref(&(0x5000..0x7000))) {
                let pages = Pages::parse(&merged.image).unwrap();
                let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
                let of_entries =
                    sum(&mut pages.entries.iter().map(|entry| entry.range.end - entry.range.start));
                assert_eq!(sum(&mut merged.pieces.iter().map(|piece| piece.bytes)), of_entries);
            }
        });
    }

    #[test]
    fn any_pagemaps_are_merged_or_refused() {
        let newest = image(&[(0x1000, 2, 4), (0x3000, 1, 1)]);
        ckpt_test_mutate::mutations(&[image(&[(0x1000, 4, 4)])], |bytes| {
            if let Some(merged) = Merged::of(&[newest.clone(), bytes.to_vec()]) {
                assert_eq!(merged.pieces.iter().map(|piece| piece.bytes).sum::<u64>(), 3 * PAGE_BYTES);
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
