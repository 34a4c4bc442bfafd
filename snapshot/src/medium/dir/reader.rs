//! Reading an object: large reads bypass the page cache, where the file system supports that.

use super::IoFeatures;
use super::root::Folder;
use super::writer::{is_in_memory, set_direct};
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader};
use rustix::fs::Advice;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

/// Reads of at least this length bypass the page cache (bytes).
const DIRECT_FROM_BYTES: usize = 64 << 10;
/// The length of the bounce buffer for unaligned reads (bytes).
const BOUNCE_BYTES: usize = 1 << 20;

/// An object that is being read.
pub(super) struct DirReader {
    file: File,
    /// The same file, opened for direct I/O.
    direct: Option<File>,
    direct_refused: AtomicBool,
    in_memory: bool,
    bytes: u64,
}

impl DirReader {
    pub(super) fn new(folder: &Folder, ways: IoFeatures) -> io::Result<Self> {
        let file = folder.open_file()?;
        let facts = file.metadata()?;
        let in_memory = is_in_memory(&file)?;
        let mut direct = None;
        if ways.direct && !in_memory && facts.len() >= DIRECT_FROM_BYTES as u64 {
            direct = folder.open_file().and_then(|file| set_direct(&file, true).map(|()| file)).ok();
        }
        // The file may have been replaced between the two opens.
        let is_same = |other: &File| {
            other.metadata().is_ok_and(|other| (other.dev(), other.ino()) == (facts.dev(), facts.ino()))
        };
        let direct = direct.filter(is_same);
        Ok(Self { file, direct, direct_refused: AtomicBool::new(false), in_memory, bytes: facts.len() })
    }

    fn read_buffered(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)?;
        if let Some(bytes) = NonZeroU64::new(into.len() as u64).filter(|_| into.len() >= DIRECT_FROM_BYTES)
            && !self.in_memory
        {
            // Only advice: no error counts.
            let _ = rustix::fs::fadvise(&self.file, offset, Some(bytes), Advice::DontNeed);
        }
        Ok(())
    }

    /// For an aligned offset and address: reads all but the last bytes directly to their destination.
    fn read_straight(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let aligned_bytes = into.len() - into.len() % BLOCK_ALIGN;
        let (straight, tail) = into.split_at_mut(aligned_bytes);
        if tail.is_empty() {
            return read_whole(file, offset, &mut [straight], aligned_bytes);
        }
        let mut last = Block::new(BLOCK_ALIGN);
        read_whole(file, offset, &mut [straight, &mut last], aligned_bytes + tail.len())?;
        tail.copy_from_slice(&last[..tail.len()]);
        Ok(())
    }

    /// Reads through a bounce buffer.
    fn read_bounced(file: &File, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
        let wanted_bytes = (into.len() + BLOCK_ALIGN).next_multiple_of(BLOCK_ALIGN);
        let mut bounce = Block::new(wanted_bytes.min(BOUNCE_BYTES));
        while !into.is_empty() {
            let skipped_bytes = (offset % BLOCK_ALIGN as u64) as usize;
            let bytes = into.len().min(bounce.len() - skipped_bytes);
            let aligned_bytes = (skipped_bytes + bytes).next_multiple_of(BLOCK_ALIGN);
            let aligned = &mut bounce[..aligned_bytes];
            read_whole(file, offset - skipped_bytes as u64, &mut [aligned], skipped_bytes + bytes)?;
            into[..bytes].copy_from_slice(&bounce[skipped_bytes..skipped_bytes + bytes]);
            offset += bytes as u64;
            into = &mut into[bytes..];
        }
        Ok(())
    }

    fn read_direct(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let is_aligned = into.as_ptr().addr().is_multiple_of(BLOCK_ALIGN);
        if is_aligned && offset.is_multiple_of(BLOCK_ALIGN as u64) {
            Self::read_straight(file, offset, into)
        } else {
            Self::read_bounced(file, offset, into)
        }
    }
}

/// Reads at least `wanted_bytes` into the consecutive `parts`, which are aligned and may be longer than the rest of the
/// file.
///
/// # Errors
/// EINVAL also if a read ends in the middle of a block: direct reads cannot continue there.
fn read_whole(file: &File, offset: u64, parts: &mut [&mut [u8]], wanted_bytes: usize) -> io::Result<()> {
    let mut done_bytes = 0;
    loop {
        let mut skip_bytes = done_bytes;
        let mut slices = Vec::with_capacity(parts.len());
        for part in parts.iter_mut() {
            let skipped = skip_bytes.min(part.len());
            skip_bytes -= skipped;
            if skipped < part.len() {
                slices.push(IoSliceMut::new(&mut part[skipped..]));
            }
        }
        match rustix::io::preadv(file, &mut slices, offset + done_bytes as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => done_bytes += bytes,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if done_bytes >= wanted_bytes {
            return Ok(());
        }
        if !done_bytes.is_multiple_of(BLOCK_ALIGN) {
            return Err(Errno::INVAL.into());
        }
    }
}

impl ObjectReader for DirReader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let is_large = into.len() >= DIRECT_FROM_BYTES && !self.direct_refused.load(Ordering::Relaxed);
        if let Some(direct) = self.direct.as_ref().filter(|_| is_large) {
            match Self::read_direct(direct, offset, into) {
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                    tracing::debug!("direct reads are refused here: reading through the page cache");
                    self.direct_refused.store(true, Ordering::Relaxed);
                }
                read => return read,
            }
        }
        self.read_buffered(offset, into)
    }
}
