//! Writes in flight: a block is handed over, and comes back when it is written, so that the next one can be filled
//! meanwhile.

use super::ring::Ring;
use crate::medium::Block;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A part of a file to be written.
pub(super) struct Write {
    pub(super) block: Block,
    /// How much of the block is to be written, from its beginning.
    pub(super) bytes: usize,
    /// Where it goes in the file (bytes).
    pub(super) offset: u64,
}

/// A write that has ended: so many bytes were written, perhaps fewer than asked for.
pub(super) struct Done {
    pub(super) write: Write,
    pub(super) written: io::Result<usize>,
}

/// The writes of one file.
pub(super) enum Queue {
    /// Where the kernel has it and the container permits it.
    Ring(Box<Ring>),
    /// A thread that writes one block after the other.
    Thread(Thread),
    /// Written at once: for file systems in memory, where waiting for nothing costs more than it brings.
    Plain(Arc<File>, VecDeque<Done>),
}

impl Queue {
    /// For up to `writes` writes at a time.
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
    /// When there are more in flight than there may be, or nobody is there to do it.
    pub(super) fn submit(&mut self, write: Write) -> io::Result<()> {
        let submitted = match self {
            Self::Ring(ring) => ring.submit(write),
            Self::Thread(thread) => thread.submit(write),
            Self::Plain(file, done) => {
                done.push_back(perform(file, write));
                Ok(())
            }
        };
        submitted.map_err(|_| io::Error::other("the queue of writes does not take another one"))
    }

    /// Waits for the end of a write; there has to be one in flight. They end in any order.
    ///
    /// # Errors
    /// When it cannot be waited for.
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
            // It ends after the writes that it has; that it panicked would have been told by `wait`.
            let _ = thread.join();
        }
    }
}
