//! Compression of chunks, where it saves space.
//!
//! Weights and optimizer moments are floats: their high bytes (sign and exponent) are similar, their low bytes are
//! noise. Interleaved, they compress badly. So the bytes of each position can be gathered into a plane of their own
//! (byte shuffling). The best method is chosen on a sample of each chunk.

use super::reserve;
use crate::chunk::CHUNK_BYTES;
use crate::format::FormatError;
use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;
use zstd::bulk::{Compressor, Decompressor};

/// The compression setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// None.
    #[default]
    None,
    /// Zstandard at this level, 1 to 19. A chunk that does not shrink is stored uncompressed.
    Zstd {
        /// The level.
        level: i32,
    },
    /// The method that compresses a sample of the chunk best: none, Zstandard, or byte planes with Zstandard, at a fast
    /// level.
    Auto,
}

/// The highest level: higher ones need too much memory for decompression.
const MAX_LEVEL: i32 = 19;
const AUTO_LEVEL: i32 = 1;

/// The text is not a valid [`Compression`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is no compression: use none, auto, zstd or zstd:LEVEL, with a level from 1 to {MAX_LEVEL}")]
pub struct CompressionError(pub String);

impl FromStr for Compression {
    type Err = CompressionError;

    fn from_str(text: &str) -> Result<Self, CompressionError> {
        match text {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            "zstd" => Ok(Self::Zstd { level: 3 }),
            _ => {
                let level = text.strip_prefix("zstd:").and_then(|level| level.parse().ok());
                let level = level.filter(|level| (1..=MAX_LEVEL).contains(level));
                level.map(|level| Self::Zstd { level }).ok_or_else(|| CompressionError(text.to_owned()))
            }
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => out.write_str("none"),
            Self::Auto => out.write_str("auto"),
            Self::Zstd { level } => write!(out, "zstd:{level}"),
        }
    }
}

/// How a chunk is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// One Zstandard frame.
    Zstd,
    /// Two byte planes of 2-byte numbers, each a Zstandard frame or uncompressed.
    Planes2,
    /// Four byte planes of 4-byte numbers, each a Zstandard frame or uncompressed.
    Planes4,
}

impl Packing {
    /// Its number on disk.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Zstd => 1,
            Self::Planes2 => 2,
            Self::Planes4 => 3,
        }
    }

    /// The method with this number on disk.
    #[must_use]
    pub fn of_number(number: u8) -> Option<Self> {
        [Self::Zstd, Self::Planes2, Self::Planes4].into_iter().find(|one| one.number() == number)
    }

    /// The number of planes; 1 means no split.
    fn planes(self) -> usize {
        match self {
            Self::Zstd => 1,
            Self::Planes2 => 2,
            Self::Planes4 => 4,
        }
    }
}

/// The sample of a chunk: this many pieces of this length (bytes). Pieces begin at multiples of 4 bytes.
const SAMPLE_PIECES: usize = 4;
const SAMPLE_PIECE_BYTES: usize = 16 << 10;
/// Shorter chunks are not compressed (bytes).
const MIN_BYTES: usize = 512;
/// The length field of a plane (bytes).
const LENGTH_BYTES: usize = 4;

/// The maximum compressed length of `bytes` bytes: compression must save 5 %.
fn worthwhile(bytes: usize) -> usize {
    bytes - bytes / 20
}

/// Compresses `content` to the beginning of `scratch`, with `spare` free bytes after it. `None` if it saves too little.
pub(super) fn pack(
    compression: Compression,
    content: &[u8],
    scratch: &mut Vec<u8>,
    spare: usize,
) -> Option<(Packing, usize)> {
    let level = match compression {
        Compression::None => return None,
        Compression::Zstd { level } => level,
        Compression::Auto => AUTO_LEVEL,
    };
    if content.len() < MIN_BYTES {
        return None;
    }
    let room = worthwhile(content.len());
    reserve(scratch, room + spare + content.len());
    let (out, planes) = scratch.split_at_mut(room + spare);
    let out = &mut out[..room];
    if compression != Compression::Auto {
        return compress(level, content, out).map(|bytes| (Packing::Zstd, bytes));
    }
    let (packing, worthy) = choose(level, content, out, planes)?;
    let bytes = match packing {
        Packing::Zstd => compress(level, content, out)?,
        _ => pack_planes(level, packing.planes(), worthy, content, out, planes)?,
    };
    Some((packing, bytes))
}

/// The method that compresses a sample of `content` best, and which of its planes are worth compressing.
fn choose(level: i32, content: &[u8], out: &mut [u8], planes: &mut [u8]) -> Option<(Packing, [bool; 4])> {
    let gathered;
    let sample = if content.len() <= 2 * SAMPLE_PIECES * SAMPLE_PIECE_BYTES {
        content
    } else {
        let step = (content.len() / SAMPLE_PIECES).next_multiple_of(4) - 4;
        let piece = |index: usize| &content[index * step..][..SAMPLE_PIECE_BYTES];
        gathered = (0..SAMPLE_PIECES).map(piece).collect::<Vec<_>>().concat();
        &gathered
    };
    let room = worthwhile(sample.len());
    let mut best = compress(level, sample, &mut out[..room]).map(|bytes| (bytes, Packing::Zstd, [true; 4]));
    for packing in [Packing::Planes2, Packing::Planes4] {
        let width = packing.planes();
        split(width, sample, &mut planes[..sample.len()]);
        let mut worthy = [false; 4];
        let mut bytes = width * LENGTH_BYTES;
        for (plane, worthy) in each_plane(width, &planes[..sample.len()]).zip(&mut worthy) {
            let room = worthwhile(plane.len());
            let compressed = compress(level, plane, &mut out[..room]);
            *worthy = compressed.is_some();
            bytes += compressed.unwrap_or(plane.len());
        }
        if bytes < room && best.is_none_or(|(least, ..)| bytes < least) {
            best = Some((bytes, packing, worthy));
        }
    }
    best.map(|(_, packing, worthy)| (packing, worthy))
}

/// Writes the lengths of the planes and the planes to `out`, and returns their total length; `None` if `out` is too
/// short.
fn pack_planes(
    level: i32,
    width: usize,
    worthy: [bool; 4],
    content: &[u8],
    out: &mut [u8],
    planes: &mut [u8],
) -> Option<usize> {
    let planes = &mut planes[..content.len()];
    split(width, content, planes);
    let mut end = width * LENGTH_BYTES;
    for (index, plane) in each_plane(width, planes).enumerate() {
        // A stored plane of full length is uncompressed by definition, so a compressed one must be shorter.
        let room = worthwhile(plane.len()).min(out.len().checked_sub(end)?);
        let compressed = worthy[index].then(|| compress(level, plane, &mut out[end..][..room])).flatten();
        let bytes = compressed.unwrap_or(plane.len());
        if compressed.is_none() {
            out.get_mut(end..end + bytes)?.copy_from_slice(plane);
        }
        let length = u32::try_from(bytes).expect("a chunk is shorter than 4 GiB");
        out[index * LENGTH_BYTES..][..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        end += bytes;
    }
    Some(end)
}

/// Decompresses `stored` to `content`. `planes` is scratch space of the same length.
pub(super) fn unpack(
    packing: Packing,
    stored: &[u8],
    content: &mut [u8],
    planes: &mut [u8],
) -> Result<(), FormatError> {
    if packing == Packing::Zstd {
        return decompress(stored, content);
    }
    let wrong = FormatError::Invalid("a chunk whose planes have impossible lengths");
    let width = packing.planes();
    let planes = &mut planes[..content.len()];
    let (lengths, mut rest) = stored.split_at_checked(width * LENGTH_BYTES).ok_or(wrong.clone())?;
    let mut begin = 0;
    for (index, length) in lengths.as_chunks::<LENGTH_BYTES>().0.iter().enumerate() {
        let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| wrong.clone())?;
        let (from, after) = rest.split_at_checked(length).ok_or(wrong.clone())?;
        rest = after;
        let plane = &mut planes[begin..][..plane_bytes(width, index, content.len())];
        begin += plane.len();
        if from.len() == plane.len() {
            plane.copy_from_slice(from);
        } else {
            decompress(from, plane)?;
        }
    }
    if !rest.is_empty() {
        return Err(wrong);
    }
    join(width, planes, content);
    Ok(())
}

/// The length of the plane `index`, which has the bytes `index`, `index + width`, ... of the content.
fn plane_bytes(width: usize, index: usize, bytes: usize) -> usize {
    (bytes + width - 1 - index) / width
}

fn each_plane(width: usize, planes: &[u8]) -> impl Iterator<Item = &[u8]> {
    (0..width).scan(0, move |begin, index| {
        let plane = &planes[*begin..][..plane_bytes(width, index, planes.len())];
        *begin += plane.len();
        Some(plane)
    })
}

/// Splits the bytes of `content` into consecutive planes; `planes` is as long as `content`.
fn split(width: usize, content: &[u8], planes: &mut [u8]) {
    match width {
        2 => split_numbers::<2>(content, planes),
        _ => split_numbers::<4>(content, planes),
    }
}

/// The reverse of [`split`].
fn join(width: usize, planes: &[u8], content: &mut [u8]) {
    match width {
        2 => join_numbers::<2>(planes, content),
        _ => join_numbers::<4>(planes, content),
    }
}

// The width is a constant so that the compiler can vectorise these loops.

fn split_numbers<const WIDTH: usize>(content: &[u8], planes: &mut [u8]) {
    let (numbers, last) = content.as_chunks::<WIDTH>();
    let mut rest = planes;
    for index in 0..WIDTH {
        let (plane, after) = rest.split_at_mut(plane_bytes(WIDTH, index, content.len()));
        rest = after;
        let (whole, end) = plane.split_at_mut(numbers.len());
        for (to, number) in whole.iter_mut().zip(numbers) {
            *to = number[index];
        }
        end.copy_from_slice(&last[index.min(last.len())..][..end.len()]);
    }
}

fn join_numbers<const WIDTH: usize>(planes: &[u8], content: &mut [u8]) {
    let bytes = content.len();
    let (numbers, last) = content.as_chunks_mut::<WIDTH>();
    let mut begin = 0;
    for index in 0..WIDTH {
        let plane = &planes[begin..][..plane_bytes(WIDTH, index, bytes)];
        begin += plane.len();
        let (whole, end) = plane.split_at(numbers.len());
        for (number, from) in numbers.iter_mut().zip(whole) {
            number[index] = *from;
        }
        if let [from] = end {
            last[index] = *from;
        }
    }
}

thread_local! {
    // Cached, since creating one takes longer than compressing a sample.
    static COMPRESSOR: RefCell<Option<(i32, Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses `content` to `out` and returns the length; `None` if `out` is too short.
fn compress(level: i32, content: &[u8], out: &mut [u8]) -> Option<usize> {
    COMPRESSOR.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(of, _)| *of != level) {
            *kept = Some((level, Compressor::new(level).ok()?));
        }
        kept.as_mut()?.1.compress_to_buffer(content, out).ok()
    })
}

/// Decompresses `stored` to `content`, which it must fill exactly.
fn decompress(stored: &[u8], content: &mut [u8]) -> Result<(), FormatError> {
    let wrong = || FormatError::Invalid("a chunk that does not decompress");
    debug_assert!(content.len() <= CHUNK_BYTES);
    DECOMPRESSOR.with_borrow_mut(|kept| {
        if kept.is_none() {
            *kept = Some(Decompressor::new().map_err(|_| wrong())?);
        }
        let decompressor = kept.as_mut().ok_or_else(wrong)?;
        let bytes = decompressor.decompress_to_buffer(stored, content).map_err(|_| wrong())?;
        if bytes == content.len() { Ok(()) } else { Err(wrong()) }
    })
}
