//! Writing an object: blocks go to a queue, past the page cache where the file system can do that.

use super::Ways;
use super::place::{Folder, Place};
use super::queue::{Done, Queue, Write};
use super::temporary::Temporary;
use crate::faults;
use crate::medium::record::Operation;
use crate::medium::{BLOCK_ALIGN, Block, ObjectWriter};
use rustix::fs::{Advice, FallocateFlags, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Space is set aside in steps, the first one smaller (bytes). Few of them: each waits for all that is in flight.
const AHEAD_FIRST_BYTES: u64 = 64 << 20;
const AHEAD_BYTES: u64 = 256 << 20;
/// No step takes more than this part of what is free: other writers are to have room, too.
const AHEAD_PART: u64 = 32;
/// What the page cache holds of an object is written out and forgotten after each so many bytes.
const FORGET_BYTES: u64 = 32 << 20;

/// An object that is being written.
pub(super) struct DirWriter {
    // Dropped before the file: waits for what is in flight.
    queue: Queue,
    temporary: Temporary,
    /// Past the page cache.
    direct: bool,
    /// Whether there are or were direct writes, that may be refused.
    tried_direct: bool,
    /// Whether space is set aside: writes into it need not wait for each other as writes that lengthen a file do.
    ahead: bool,
    /// Whether the file system lies in memory.
    in_memory: bool,
    free: Vec<Block>,
    blocks_left: usize,
    block_bytes: usize,
    in_flight: usize,
    /// The object's length so far.
    position: u64,
    /// The file's length so far: with what is set aside, and what the last block is padded with.
    file_bytes: u64,
    /// Up to here, nothing is in the page cache.
    forgotten_bytes: u64,
    failure: Option<io::Error>,
}

impl DirWriter {
    pub(super) fn new(
        place: &Place,
        folder: Folder,
        ways: Ways,
        blocks: usize,
        block_bytes: usize,
    ) -> io::Result<Self> {
        if block_bytes == 0 || !block_bytes.is_multiple_of(BLOCK_ALIGN) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "blocks of an odd length"));
        }
        let temporary = Temporary::new(place, folder)?;
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
            ahead: direct && rustix::process::getrlimit(rustix::process::Resource::Fsize).current.is_none(),
            in_memory,
            free: Vec::new(),
            blocks_left: blocks,
            block_bytes,
            in_flight: 0,
            position: 0,
            file_bytes: 0,
            forgotten_bytes: 0,
            failure: None,
        })
    }

    /// Takes note of an error: there is no way back from one.
    fn failed<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result {
            self.failure.get_or_insert_with(|| copy(error));
        }
        result
    }

    fn check(&self) -> io::Result<()> {
        self.failure.as_ref().map_or(Ok(()), |error| Err(copy(error)))
    }

    /// Sets space aside up to `end` and beyond. That it cannot be had is no failure: the writes will tell.
    fn set_aside(&mut self, end: u64) {
        if !self.ahead || end <= self.file_bytes {
            return;
        }
        let file = &self.temporary.file;
        let free_bytes = rustix::fs::fstatvfs(file).map_or(0, |facts| facts.f_bavail * facts.f_frsize);
        let step_bytes = if self.position == 0 { AHEAD_FIRST_BYTES } else { AHEAD_BYTES };
        let bytes = step_bytes.min(free_bytes / AHEAD_PART).max(end - self.file_bytes);
        let set_aside = rustix::fs::fallocate(file, FallocateFlags::empty(), self.file_bytes, bytes);
        self.ahead = set_aside.is_ok();
        // Some of it may be there even so.
        self.file_bytes += bytes;
        let bytes = self.file_bytes;
        self.temporary.note(|path| Operation::SetLength { path, bytes });
    }

    fn submit(&mut self, mut block: Block) -> io::Result<()> {
        faults::hit("save-write")?;
        if !self.position.is_multiple_of(BLOCK_ALIGN as u64) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a block after the last one"));
        }
        let filled = block.filled();
        let mut bytes = filled;
        if self.direct {
            bytes = filled.next_multiple_of(BLOCK_ALIGN);
            block[filled..bytes].fill(0);
        }
        let (offset, end) = (self.position, self.position + bytes as u64);
        // A first block that is not full is a small object.
        if self.position > 0 || filled == block.len() {
            self.set_aside(end);
        }
        self.file_bytes = self.file_bytes.max(end);
        self.temporary.note(|path| Operation::Write { path, offset, content: block[..bytes].to_vec() });
        self.queue.submit(Write { block, bytes, offset })?;
        self.in_flight += 1;
        self.position += filled as u64;
        self.forget(FORGET_BYTES);
        Ok(())
    }

    /// Waits for the end of a write, and puts it right if it was not a whole one.
    fn settle(&mut self) -> io::Result<()> {
        let Done { write, written } = self.queue.wait()?;
        self.in_flight -= 1;
        let done = match written {
            Ok(written) => written,
            // The file system takes direct writes, but not these.
            Err(error) if is(&error, Errno::INVAL) && self.tried_direct => 0,
            // io_uring gives up what a thread had submitted that has ended.
            Err(error)
                if [Errno::INTR, Errno::AGAIN, Errno::CANCELED].iter().any(|&errno| is(&error, errno)) =>
            {
                0
            }
            Err(error) => return Err(error),
        };
        if done < write.bytes {
            self.write_rest(&write, done)?;
        }
        let mut block = write.block;
        block.set_filled(0);
        self.free.push(block);
        Ok(())
    }

    /// Writes what is left of `write` behind its first `done` bytes.
    fn write_rest(&mut self, write: &Write, done: usize) -> io::Result<()> {
        let (rest, offset) = (&write.block[done..write.bytes], write.offset + done as u64);
        match self.temporary.file.write_all_at(rest, offset) {
            Err(error) if is(&error, Errno::INVAL) && self.tried_direct => {
                tracing::debug!("direct writes are refused here: writing through the page cache");
                set_direct(&self.temporary.file, false)?;
                (self.direct, self.ahead) = (false, false);
                self.temporary.file.write_all_at(rest, offset)
            }
            written => written,
        }
    }

    /// Has the page cache write out and forget what it holds, if that is `from_bytes` or more.
    fn forget(&mut self, from_bytes: u64) {
        if self.direct || self.in_memory || self.position - self.forgotten_bytes < from_bytes {
            return;
        }
        // The first advice begins to write out; what is clean by the next one is forgotten. Only advice: no error counts.
        let _ = rustix::fs::fadvise(&self.temporary.file, 0, None, Advice::DontNeed);
        self.forgotten_bytes = self.position;
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
            let settled = self.settle();
            self.failed(settled)?;
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
            self.settle()?;
        }
        if self.file_bytes != self.position {
            let bytes = self.position;
            self.temporary.note(|path| Operation::SetLength { path, bytes });
            self.temporary.file.set_len(bytes)?;
        }
        faults::hit("save-fsync")?;
        self.temporary.sync()?;
        self.forget(1);
        faults::hit("save-rename")?;
        self.temporary.publish_new()
    }
}

/// Whether the file lies in memory and nowhere else.
pub(super) fn is_in_memory(file: &File) -> io::Result<bool> {
    // linux/magic.h
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const RAMFS_MAGIC: u64 = 0x8584_58f6;
    let kind = u64::from_ne_bytes(rustix::fs::fstatfs(file)?.f_type.to_ne_bytes());
    Ok(matches!(kind, TMPFS_MAGIC | RAMFS_MAGIC))
}

/// Turns direct I/O on or off.
///
/// # Errors
/// EINVAL where the file system does not have it. (To ask for it in `open` would leave an empty file there.)
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(rustix::fs::fcntl_setfl(file, flags)?)
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

fn copy(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RelPath;
    use crate::medium::record::Notes;
    use std::collections::VecDeque;
    use std::fs;
    use std::sync::Arc;

    /// A writer whose one write so far has ended with `result`; `done_bytes` of it are in the file.
    fn after(result: io::Result<usize>, done_bytes: usize) -> (tempfile::TempDir, Box<DirWriter>) {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let place = Place::new(dir.path().to_owned(), Notes::default());
        let folder = place.make_folder_of(&RelPath::new("x").unwrap()).unwrap();
        let mut writer = DirWriter::new(&place, folder, Ways::default(), 2, 4 * BLOCK_ALIGN).unwrap();
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
    fn what_a_write_has_left_is_written() {
        let again = |errno: Errno| Err(errno.into());
        for (result, done_bytes) in [
            (Ok(BLOCK_ALIGN), BLOCK_ALIGN),
            (Ok(0), 0),
            (Ok(4 * BLOCK_ALIGN), 4 * BLOCK_ALIGN),
            (again(Errno::INTR), 0),
            (again(Errno::CANCELED), 0),
            (again(Errno::AGAIN), 0),
        ] {
            let what = format!("{result:?}");
            let (dir, writer) = after(result, done_bytes);
            writer.finish().unwrap();
            assert!(fs::read(dir.path().join("x")).unwrap() == [7; 4 * BLOCK_ALIGN], "{what}");
        }
    }

    #[test]
    fn direct_writes_that_are_refused_go_through_the_page_cache() {
        // 100 is in the middle of a sector: there is no direct write that goes on from there.
        for (result, done_bytes) in [(Ok(100), BLOCK_ALIGN), (Err(Errno::INVAL.into()), 0)] {
            let is_short = result.is_ok();
            let (dir, mut writer) = after(result, done_bytes);
            assert!(writer.direct, "the file system of /var/tmp has direct I/O");
            writer.settle().unwrap();
            assert!(!is_short || !writer.direct);
            writer.finish().unwrap();
            assert!(fs::read(dir.path().join("x")).unwrap() == [7; 4 * BLOCK_ALIGN]);
        }
    }

    #[test]
    fn a_failed_write_is_the_end() {
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
