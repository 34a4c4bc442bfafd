//! Writing an object: blocks go through a queue and bypass the page cache, where the file system supports that.

use super::IoFeatures;
use super::queue::{Done, Queue, Write};
use super::root::Folder;
use super::temporary::Temporary;
use crate::faults;
use crate::files::is_of_memory;
use crate::medium::record::Operation;
use crate::medium::{BLOCK_ALIGN, Block, ObjectWriter};
use crate::read_failure::copy_of;
use rustix::fs::{Advice, FallocateFlags, OFlags};
use rustix::io::{Errno, retry_on_intr};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Space is preallocated in steps, the first one smaller (bytes). The steps are large, since each waits for all writes
/// in flight.
const PREALLOCATE_FIRST_BYTES: u64 = 64 << 20;
const PREALLOCATE_BYTES: u64 = 256 << 20;
/// A step takes at most one part in this many of the free space, to leave room for other writers.
const PREALLOCATE_FREE_DIVISOR: u64 = 32;
/// The object's pages are evicted from the page cache after every so many bytes.
const EVICT_BYTES: u64 = 32 << 20;

/// An object that is being written.
pub(super) struct DirWriter {
    // Dropped before the file: waits for writes in flight.
    queue: Queue,
    temporary: Temporary,
    /// Whether writes bypass the page cache.
    direct: bool,
    /// Whether any write was direct: the file system may refuse such writes later.
    tried_direct: bool,
    /// Whether space is preallocated: writes into it run concurrently, while writes that extend a file are serialised.
    preallocates: bool,
    /// Whether the file system is in memory.
    in_memory: bool,
    free: Vec<Block>,
    blocks_left: usize,
    block_bytes: usize,
    in_flight: usize,
    /// The object's length so far.
    position: u64,
    /// The file's length so far, with preallocated space and the padding of the last block.
    file_bytes: u64,
    /// Up to this offset, the page cache was evicted.
    evicted_bytes: u64,
    failure: Option<io::Error>,
}

impl DirWriter {
    pub(super) fn new(
        folder: Folder,
        ways: IoFeatures,
        blocks: usize,
        block_bytes: usize,
    ) -> io::Result<Self> {
        if block_bytes == 0 || !block_bytes.is_multiple_of(BLOCK_ALIGN) {
            return Err(invalid("the length of the blocks is not aligned"));
        }
        let temporary = Temporary::new(folder)?;
        let in_memory = is_in_memory(&temporary.file)?;
        let direct = ways.direct && !in_memory && set_direct(&temporary.file, true).is_ok();
        let blocks = blocks.max(1);
        let queue = if in_memory {
            Queue::plain(&temporary.file)
        } else {
            Queue::new(&temporary.file, blocks, ways.ring)
        };
        Ok(Self {
            queue,
            temporary,
            direct,
            tried_direct: direct,
            preallocates: direct
                && rustix::process::getrlimit(rustix::process::Resource::Fsize).current.is_none(),
            in_memory,
            free: Vec::new(),
            blocks_left: blocks,
            block_bytes,
            in_flight: 0,
            position: 0,
            file_bytes: 0,
            evicted_bytes: 0,
            failure: None,
        })
    }

    /// Remembers an error: the writer cannot be used after one.
    fn failed<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result {
            self.failure.get_or_insert_with(|| copy_of(error));
        }
        result
    }

    fn check(&self) -> io::Result<()> {
        self.failure.as_ref().map_or(Ok(()), |error| Err(copy_of(error)))
    }

    /// Preallocates space up to `end` and beyond. A failure is ignored: the writes will fail if there is no space.
    fn preallocate(&mut self, end: u64) {
        if !self.preallocates || end <= self.file_bytes {
            return;
        }
        let file = &self.temporary.file;
        let free_bytes = rustix::fs::fstatvfs(file).map_or(0, |facts| facts.f_bavail * facts.f_frsize);
        let step_bytes = if self.position == 0 { PREALLOCATE_FIRST_BYTES } else { PREALLOCATE_BYTES };
        let bytes = step_bytes.min(free_bytes / PREALLOCATE_FREE_DIVISOR).max(end - self.file_bytes);
        let allocated =
            retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), self.file_bytes, bytes));
        self.preallocates = allocated.is_ok();
        // A failed call may have allocated a part.
        self.file_bytes += bytes;
        let bytes = self.file_bytes;
        self.temporary.note(|path| Operation::SetLength { path, bytes });
    }

    fn submit(&mut self, mut block: Block) -> io::Result<()> {
        faults::hit("save-write")?;
        if !self.position.is_multiple_of(BLOCK_ALIGN as u64) {
            return Err(invalid("a block follows an unaligned last block"));
        }
        let filled = block.filled();
        let mut bytes = filled;
        if self.direct {
            bytes = filled.next_multiple_of(BLOCK_ALIGN);
            block[filled..bytes].fill(0);
        }
        let (offset, end) = (self.position, self.position + bytes as u64);
        // If the first block is not full, the object is small and needs no preallocation.
        if self.position > 0 || filled == block.len() {
            self.preallocate(end);
        }
        self.file_bytes = self.file_bytes.max(end);
        self.temporary.note(|path| Operation::Write { path, offset, content: block[..bytes].to_vec() });
        self.queue.submit(Write { block, bytes, offset })?;
        self.in_flight += 1;
        self.position += filled as u64;
        self.evict(EVICT_BYTES);
        Ok(())
    }

    /// Waits for the completion of a write, and completes a short write.
    fn wait_for_write(&mut self) -> io::Result<()> {
        let Done { write, written } = self.queue.wait()?;
        self.in_flight -= 1;
        let done = match written {
            Ok(written) => written,
            Err(error) => match Errno::from_io_error(&error) {
                // The file system supports direct writes, but refuses this one.
                Some(Errno::INVAL) if self.tried_direct => 0,
                // io_uring cancels writes whose submitting thread has ended.
                Some(Errno::INTR | Errno::AGAIN | Errno::CANCELED) => 0,
                _ => return Err(error),
            },
        };
        if done < write.bytes {
            self.write_rest(&write, done)?;
        }
        let mut block = write.block;
        block.set_filled(0);
        self.free.push(block);
        Ok(())
    }

    /// Writes the rest of `write` after its first `done` bytes.
    fn write_rest(&mut self, write: &Write, done: usize) -> io::Result<()> {
        let (rest, offset) = (&write.block[done..write.bytes], write.offset + done as u64);
        match self.temporary.file.write_all_at(rest, offset) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) && self.tried_direct => {
                tracing::debug!("direct writes are refused here: writing through the page cache");
                set_direct(&self.temporary.file, false)?;
                (self.direct, self.preallocates) = (false, false);
                self.temporary.file.write_all_at(rest, offset)
            }
            written => written,
        }
    }

    /// Evicts the object from the page cache, if at least `from_bytes` were written since the last time.
    fn evict(&mut self, from_bytes: u64) {
        if self.direct || self.in_memory || self.position - self.evicted_bytes < from_bytes {
            return;
        }
        // The advice starts the write-back of dirty pages and evicts clean ones. Only advice: errors are ignored.
        let _ = rustix::fs::fadvise(&self.temporary.file, 0, None, Advice::DontNeed);
        self.evicted_bytes = self.position;
    }
}

impl ObjectWriter for DirWriter {
    fn block(&mut self) -> io::Result<Block> {
        self.check()?;
        if self.free.is_empty() && self.blocks_left > 0 {
            self.blocks_left -= 1;
            return Ok(Block::new(self.block_bytes));
        }
        while self.free.is_empty() && self.in_flight > 0 {
            let written = self.wait_for_write();
            self.failed(written)?;
        }
        self.free.pop().ok_or_else(|| io::Error::other("all blocks of this writer are in use"))
    }

    fn append(&mut self, block: Block) -> io::Result<()> {
        self.check()?;
        if block.filled() == 0 {
            self.free.push(block);
            return Ok(());
        }
        let submitted = self.submit(block);
        self.failed(submitted)
    }

    fn finish(mut self: Box<Self>) -> io::Result<()> {
        self.check()?;
        while self.in_flight > 0 {
            self.wait_for_write()?;
        }
        if self.file_bytes != self.position {
            let bytes = self.position;
            self.temporary.note(|path| Operation::SetLength { path, bytes });
            self.temporary.file.set_len(bytes)?;
        }
        faults::hit("save-fsync")?;
        self.temporary.sync()?;
        self.evict(1);
        faults::hit("save-rename")?;
        self.temporary.publish()
    }
}

/// Whether the file's file system is in memory.
pub(super) fn is_in_memory(file: &File) -> io::Result<bool> {
    Ok(is_of_memory(&rustix::fs::fstatfs(file)?))
}

/// Turns direct I/O on or off.
///
/// # Errors
/// EINVAL if the file system does not support it. (`open` with O_DIRECT would create an empty file before it fails.)
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(rustix::fs::fcntl_setfl(file, flags)?)
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RelPath;
    use crate::medium::dir::root::Root;
    use crate::medium::record::Notes;
    use std::collections::VecDeque;
    use std::fs;
    use std::sync::Arc;

    /// A writer whose only write has completed with `result`, with `done_bytes` of it in the file.
    fn after(result: io::Result<usize>, done_bytes: usize) -> (tempfile::TempDir, Box<DirWriter>) {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let root = Root::new(dir.path().to_owned(), Notes::default());
        let folder = root.make_folder_of(&RelPath::new("x").unwrap()).unwrap();
        let mut writer = DirWriter::new(folder, IoFeatures::default(), 2, 4 * BLOCK_ALIGN).unwrap();
        let mut block = writer.block().unwrap();
        block.fill(7);
        let bytes = block.len();
        let file = Arc::clone(&writer.temporary.file);
        file.write_all_at(&block[..done_bytes], 0).unwrap();
        let done = VecDeque::from([Done { write: Write { block, bytes, offset: 0 }, written: result }]);
        writer.queue = Queue::Plain(file, done);
        (writer.in_flight, writer.position, writer.file_bytes) = (1, bytes as u64, bytes as u64);
        (dir, Box::new(writer))
    }

    #[test]
    fn short_and_interrupted_writes_are_completed() {
        let failed = |errno: Errno| Err(errno.into());
        for (result, done_bytes) in [
            (Ok(BLOCK_ALIGN), BLOCK_ALIGN),
            (Ok(0), 0),
            (Ok(4 * BLOCK_ALIGN), 4 * BLOCK_ALIGN),
            (failed(Errno::INTR), 0),
            (failed(Errno::CANCELED), 0),
            (failed(Errno::AGAIN), 0),
        ] {
            let what = format!("{result:?}");
            let (dir, writer) = after(result, done_bytes);
            writer.finish().unwrap();
            assert!(fs::read(dir.path().join("x")).unwrap() == [7; 4 * BLOCK_ALIGN], "{what}");
        }
    }

    #[test]
    fn refused_direct_writes_fall_back_to_the_page_cache() {
        // 100 is in the middle of a sector, where no direct write can continue.
        for (result, done_bytes) in [(Ok(100), BLOCK_ALIGN), (Err(Errno::INVAL.into()), 0)] {
            let is_short = result.is_ok();
            let (dir, mut writer) = after(result, done_bytes);
            assert!(writer.direct, "the file system of /var/tmp has direct I/O");
            writer.wait_for_write().unwrap();
            assert!(!is_short || !writer.direct);
            writer.finish().unwrap();
            assert!(fs::read(dir.path().join("x")).unwrap() == [7; 4 * BLOCK_ALIGN]);
        }
    }

    #[test]
    fn a_failed_write_makes_the_writer_unusable() {
        let (dir, mut writer) = after(Err(Errno::IO.into()), 0);
        writer.blocks_left = 0;
        let failed = writer.block().unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(Errno::IO.raw_os_error()));
        assert!(writer.block().is_err());
        assert!(writer.append(Block::new(BLOCK_ALIGN)).is_err());
        assert!(writer.finish().is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
