//! Writes to a file in memory with many threads.
//!
//! The kernel lets one thread at a time write to a file by write(2), which allocates and fills its pages meanwhile. Pages of
//! a mapping are allocated and filled by all threads concurrently.

use std::fs::File;
use std::io;

use memmap2::{Advice, MmapOptions, MmapRaw};

/// A file in memory, mapped.
pub struct MappedFile {
    map: MmapRaw,
}

impl MappedFile {
    /// Maps a file of this length.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(file)? })
    }

    /// Writes to the file. Nobody may shorten it meanwhile: a signal would end this process. Threads may write to different
    /// ranges concurrently.
    ///
    /// # Errors
    /// When there is no memory, or the range is not in the mapping; [`io::ErrorKind::InvalidInput`] also where the kernel
    /// cannot allocate pages in advance (before Linux 5.14).
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.map.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // A page that cannot be allocated is an error here, and would be a signal below.
        let populated = self.map.advise_range(Advice::PopulateWrite, offset, bytes.len());
        populated.map_err(|error| match error.raw_os_error() {
            // The file system is full (madvise(2), MADV_POPULATE_WRITE).
            Some(libc::EFAULT) => io::ErrorKind::StorageFull.into(),
            _ => error,
        })?;
        // SAFETY: the range is in the mapping.
        let target = unsafe { self.map.as_mut_ptr().add(offset) };
        // SAFETY: the mapping lives as long as `self`. It is memory of a file, so it does not overlap `bytes`, and nothing
        // refers to it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use crate::files::staging::unnamed_file;

    use super::*;

    #[test]
    fn what_is_written_is_in_the_file_and_the_rest_has_no_memory() {
        const MIB: usize = 1 << 20;
        let file = unnamed_file().unwrap();
        file.set_len(64 * MIB as u64).unwrap();
        let mapped = MappedFile::new(&file, 64 * MIB as u64).unwrap();
        let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(3 * MIB).collect();
        let parts = [(0, MIB), (10 * MIB + 7, 3 * MIB), (61 * MIB, 3 * MIB)];
        std::thread::scope(|scope| {
            for (at, bytes) in parts {
                let (mapped, content) = (&mapped, &content);
                scope.spawn(move || mapped.write_at(at as u64, &content[..bytes]).unwrap());
            }
        });
        for (at, bytes) in parts {
            let mut found = vec![0; bytes];
            file.read_exact_at(&mut found, at as u64).unwrap();
            assert!(found == content[..bytes], "at {at}");
        }
        let allocated_bytes = file.metadata().unwrap().blocks() * 512;
        assert!(allocated_bytes <= 16 * MIB as u64, "{allocated_bytes}");
        for at in [64 * MIB as u64, u64::MAX] {
            assert_eq!(mapped.write_at(at, &[1]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
