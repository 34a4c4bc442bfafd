//! Asynchronous writes: the caller submits a block and gets it back when it is written. Meanwhile it can fill the next
//! one.

use super::ring::Ring;
use crate::medium::Block;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A write to a file.
pub(super) struct Write {
    pub(super) block: Block,
    /// How many bytes of the block to write, from its beginning.
    pub(super) bytes: usize,
    /// The offset in the file (bytes).
    pub(super) offset: u64,
}

/// A completed write, with the number of bytes written: it may be a short write.
pub(super) struct Done {
    pub(super) write: Write,
    pub(super) written: io::Result<usize>,
}

/// The writes of one file.
pub(super) enum Queue {
    /// io_uring, where the kernel has it and the container permits it.
    Ring(Box<Ring>),
    /// A thread that writes one block after the other.
    Thread(Thread),
    /// Synchronous writes: for file systems in memory, where asynchronous writes gain nothing.
    Plain(Arc<File>, VecDeque<Done>),
}

impl Queue {
    /// A queue for up to `writes` concurrent writes.
    pub(super) fn new(file: &Arc<File>, writes: usize, ring: bool) -> Self {
        let ring = if ring { Ring::new(file, writes) } else { None };
        match ring.map(|ring| Self::Ring(Box::new(ring))).or_else(|| Thread::new(file).map(Self::Thread)) {
            Some(queue) => queue,
            None => Self::plain(file),
        }
    }

    pub(super) fn plain(file: &Arc<File>) -> Self {
        Self::Plain(Arc::clone(file), VecDeque::new())
    }

    /// Begins a write.
    ///
    /// # Errors
    /// If too many writes are in flight, or the writing thread has ended.
    pub(super) fn submit(&mut self, write: Write) -> io::Result<()> {
        let submitted = match self {
            Self::Ring(ring) => ring.submit(write),
            Self::Thread(thread) => thread.submit(write),
            Self::Plain(file, done) => {
                done.push_back(perform(file, write));
                Ok(())
            }
        };
        submitted.map_err(|_| io::Error::other("the queue of writes is full or closed"))
    }

    /// Waits for the completion of a write; one must be in flight. Writes complete in any order.
    ///
    /// # Errors
    /// If the wait fails.
    pub(super) fn wait(&mut self) -> io::Result<Done> {
        match self {
            Self::Ring(ring) => ring.wait(),
            Self::Thread(thread) => thread.wait(),
            Self::Plain(_, done) => done.pop_front().ok_or_else(|| io::Error::other("no write is in flight")),
        }
    }
}

fn perform(file: &File, write: Write) -> Done {
    let written = file.write_at(&write.block[..write.bytes], write.offset);
    Done { write, written }
}

/// A thread that writes.
pub(super) struct Thread {
    // Dropped first: this ends the thread.
    jobs: Option<Sender<Write>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    fn new(file: &Arc<File>) -> Option<Self> {
        let (jobs, todo) = channel();
        let (ended, done) = channel();
        let file = Arc::clone(file);
        let work = move || {
            for write in todo {
                if ended.send(perform(&file, write)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("pack-writer".into()).spawn(work).ok()?;
        Some(Self { jobs: Some(jobs), done, thread: Some(thread) })
    }

    fn submit(&mut self, write: Write) -> Result<(), Write> {
        match &self.jobs {
            Some(jobs) => jobs.send(write).map_err(|error| error.0),
            None => Err(write),
        }
    }

    fn wait(&mut self) -> io::Result<Done> {
        self.done.recv().map_err(|_| io::Error::other("the writing thread has ended"))
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It ends after its pending writes. `wait` has reported a panic already.
            let _ = thread.join();
        }
    }
}
