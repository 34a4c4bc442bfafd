//! Fat binaries: containers of device code for several architectures. The layout is that of the files that
//! NVIDIA's `fatbinary` tool writes (seen with CUDA 13.5's): a header, then entries, each with a header of its
//! own. All numbers are little-endian.

use std::ffi::c_void;
use std::io::Read;

use cuda_abi::sys::CUresult;

use crate::error::Result;

/// `struct { u32 magic; u32 version; const void *container; void *file_name; }`: what `nvcc` puts into
/// `.nvFatBinSegment` (`fatbinary_section.h`).
const WRAPPER_MAGIC: u32 = 0x466243b1;
const WRAPPER_CONTAINER_OFFSET: usize = 8;

/// `u32 magic, u16 version, u16 header size, u64 size of what follows`.
const CONTAINER_MAGIC: u32 = 0xba55_ed50;
const CONTAINER_HEADER_BYTES: usize = 16;

/// An entry's header: `u16 kind, u16 version, u32 header size, u64 payload size, u32 compressed size,
/// u32 offset of options, u16 minor and u16 major version, u32 architecture, …, u64 flags at 40, …,
/// u64 uncompressed size at 56`.
const ENTRY_HEADER_BYTES: usize = 64;
const KIND_PTX: u16 = 1;
const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;

/// A PTX text larger than this is no text but a damaged header.
const PTX_BYTES_MAX: usize = 1 << 30;

/// Where the container of a wrapper lies; any other image is returned as it is.
///
/// # Safety
/// `image` points to an image or to a NUL-terminated text.
pub(super) unsafe fn container_of(image: *const c_void) -> *const c_void {
    for (index, expected) in WRAPPER_MAGIC.to_le_bytes().into_iter().enumerate() {
        // SAFETY: the bytes up to here are those of the magic, so that no text has ended yet.
        let byte = unsafe { image.cast::<u8>().add(index) };
        // SAFETY: as above.
        if unsafe { byte.read() } != expected {
            return image;
        }
    }
    // SAFETY: the magic says that this is a wrapper, whose third field is the container's address.
    let field = unsafe { image.cast::<u8>().add(WRAPPER_CONTAINER_OFFSET) };
    // SAFETY: as above.
    unsafe { field.cast::<*const c_void>().read_unaligned() }
}

pub(super) fn is_container(bytes: &[u8]) -> bool {
    bytes.starts_with(&CONTAINER_MAGIC.to_le_bytes())
}

/// The size of a whole container by its header.
pub(super) fn container_bytes(header: &[u8; CONTAINER_HEADER_BYTES]) -> usize {
    let header_bytes = usize::from(number::<2>(header, 6) as u16);
    usize::try_from(number::<8>(header, 8)).unwrap_or(0).saturating_add(header_bytes)
}

/// `N` bytes at `offset`, which must be inside, as a number.
fn number<const N: usize>(bytes: &[u8], offset: usize) -> u64 {
    bytes[offset..offset + N].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

struct Entry<'a> {
    kind: u16,
    architecture: u32,
    flags: u64,
    compressed_bytes: usize,
    uncompressed_bytes: usize,
    payload: &'a [u8],
}

/// The PTX of the newest architecture that is not newer than `sm`.
///
/// # Errors
/// `CUDA_ERROR_INVALID_IMAGE` for a damaged container, `CUDA_ERROR_NO_BINARY_FOR_GPU` if it has no such PTX.
pub(super) fn newest_ptx(container: &[u8], sm: u32) -> Result<Vec<u8>> {
    let entries = entries(container).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    // Of several equally new ones the first counts.
    let newest = entries
        .iter()
        .rev()
        .filter(|entry| entry.kind == KIND_PTX && entry.architecture <= sm)
        .max_by_key(|entry| entry.architecture)
        .ok_or(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU)?;
    unpack(newest).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)
}

fn entries(container: &[u8]) -> Option<Vec<Entry<'_>>> {
    let header = container.first_chunk()?;
    let mut rest = container.get(usize::from(number::<2>(header, 6) as u16)..container_bytes(header))?;
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let header = rest.get(..ENTRY_HEADER_BYTES)?;
        let size = |offset| usize::try_from(number::<8>(header, offset)).ok();
        let header_bytes = number::<4>(header, 4) as usize;
        if header_bytes < ENTRY_HEADER_BYTES {
            return None;
        }
        let (payload, after) = rest.get(header_bytes..)?.split_at_checked(size(8)?)?;
        entries.push(Entry {
            kind: number::<2>(header, 0) as u16,
            architecture: number::<4>(header, 28) as u32,
            flags: number::<8>(header, 40),
            compressed_bytes: number::<4>(header, 16) as usize,
            uncompressed_bytes: size(56)?,
            payload,
        });
        rest = after;
    }
    Some(entries)
}

fn unpack(entry: &Entry<'_>) -> Option<Vec<u8>> {
    if entry.flags & (FLAG_LZ4 | FLAG_ZSTD) == 0 {
        return Some(entry.payload.to_vec());
    }
    // The payload is padded: only the stated compressed size belongs to the stream.
    let packed = entry.payload.get(..entry.compressed_bytes)?;
    if entry.uncompressed_bytes > PTX_BYTES_MAX {
        return None;
    }
    if entry.flags & FLAG_LZ4 != 0 {
        return lz4_flex::block::decompress(packed, entry.uncompressed_bytes).ok();
    }
    let mut text = Vec::new();
    let decoder = ruzstd::decoding::StreamingDecoder::new(packed).ok()?;
    decoder.take(entry.uncompressed_bytes as u64).read_to_end(&mut text).ok()?;
    (text.len() == entry.uncompressed_bytes).then_some(text)
}

#[cfg(test)]
mod tests;
