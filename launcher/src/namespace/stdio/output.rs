//! Relaying one output stream of the job: one thread reads, another writes.

use super::tail::Tail;
use super::{STEP_BYTES, own_stream, regular_file};
use crate::sys::deadline::{OUTPUT_RETRY_INTERVAL, OUTPUT_RETRY_TIMEOUT};
use ckpt_snapshot::OpenFile;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::retry_on_intr;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// The most output that a relay buffers.
const QUEUE_LIMIT_BYTES: usize = 1 << 20;

/// One stream from the job to the launcher.
pub(super) struct Output {
    /// The job's descriptors that the stream serves.
    pub(super) job_fds: Vec<u32>,
    /// The inode, by which CRIU identifies the pipe.
    pub(super) inode: u64,
    /// `None` once the launcher's output is closed: the job's end is then closed too, as without a launcher.
    source: Mutex<Option<Arc<OwnedFd>>>,
    sink: File,
    /// When the launcher's output was found to be closed.
    pub(super) closed_at: Mutex<Option<Instant>>,
    queue: Mutex<Queue>,
    changed: Condvar,
    tail: Arc<Tail>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// A chunk was removed from `waiting` and is being written.
    writing: bool,
    ended: bool,
}

impl Output {
    pub(super) fn new(
        job_fds: Vec<u32>,
        source: Arc<OwnedFd>,
        ours: usize,
        tail: Arc<Tail>,
    ) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&source)?;
        rustix::fs::fcntl_setfl(&source, flags | OFlags::NONBLOCK)?;
        let sink = File::from(own_stream(ours).try_clone_to_owned()?);
        let inode = rustix::fs::fstat(&source)?.st_ino;
        let source = Mutex::new(Some(source));
        let (closed_at, queue, changed) = (Mutex::new(None), Mutex::default(), Condvar::new());
        Ok(Self { job_fds, inode, source, sink, closed_at, queue, changed, tail })
    }

    /// Reads once; `None` if nothing can be read now, or the stream has ended.
    fn read_some(&self, queue: &mut Queue) -> io::Result<Option<usize>> {
        let mut buffer = vec![0; STEP_BYTES];
        let Some(source) = self.source.lock().clone() else { return Ok(None) };
        match retry_on_intr(|| rustix::io::read(&source, &mut buffer[..])) {
            Ok(0) => queue.ended = true,
            Ok(read) => {
                buffer.truncate(read);
                self.tail.push(&buffer);
                queue.waiting.push_back(buffer);
                queue.waiting_bytes += read;
                self.changed.notify_all();
                return Ok(Some(read));
            }
            // No process has the terminal open any more.
            Err(rustix::io::Errno::IO) => queue.ended = true,
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        self.changed.notify_all();
        Ok(None)
    }

    pub(super) fn read_all(&self) -> io::Result<()> {
        let mut queue = self.queue.lock();
        while self.read_some(&mut queue)?.is_some() {}
        Ok(())
    }

    pub(super) fn read_loop(&self) {
        loop {
            let Some(source) = self.source.lock().clone() else { return };
            let _ = poll(&mut [PollFd::new(&source, PollFlags::IN)], None);
            drop(source);
            let mut queue = self.queue.lock();
            let is_full = |queue: &mut Queue| queue.waiting_bytes >= QUEUE_LIMIT_BYTES && !queue.ended;
            self.changed.wait_while(&mut queue, is_full);
            if !queue.ended && self.read_some(&mut queue).is_err() {
                queue.ended = true;
                self.changed.notify_all();
            }
            if queue.ended {
                return;
            }
        }
    }

    pub(super) fn write_loop(&self) {
        let mut is_discarding = false;
        let mut queue = self.queue.lock();
        loop {
            if let Some(chunk) = queue.waiting.pop_front() {
                queue.writing = true;
                drop(queue);
                match self.write_chunk(&chunk, is_discarding) {
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                        *self.closed_at.lock() = Some(Instant::now());
                        drop(self.source.lock().take());
                    }
                    Err(error) if !is_discarding => {
                        tracing::warn!("the job's output cannot be written and is discarded: {error}");
                        is_discarding = true;
                    }
                    Ok(()) if is_discarding => {
                        tracing::warn!("the job's output can be written again; a part of it is missing");
                        is_discarding = false;
                    }
                    _ => {}
                }
                queue = self.queue.lock();
                queue.writing = false;
                queue.waiting_bytes -= chunk.len();
                self.changed.notify_all();
            } else if queue.ended {
                return;
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }

    /// Writes a chunk. A file whose disk is full or fails is tried again for a while: nothing is lost if that passes, and
    /// the job waits meanwhile if it writes much.
    fn write_chunk(&self, chunk: &[u8], is_discarding: bool) -> io::Result<()> {
        let mut deadline = None;
        let mut left = chunk;
        while !left.is_empty() {
            match (&self.sink).write(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => left = &left[bytes..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_discarding || regular_file(self.sink.as_fd()).is_none() => {
                    return Err(error);
                }
                Err(error) => {
                    let deadline = *deadline.get_or_insert_with(|| Instant::now() + OUTPUT_RETRY_TIMEOUT);
                    if Instant::now() > deadline {
                        return Err(error);
                    }
                    std::thread::sleep(OUTPUT_RETRY_INTERVAL);
                }
            }
        }
        Ok(())
    }

    /// Ends the relay: writes the remaining output, at most until `deadline`.
    pub(super) fn finish(&self, deadline: Instant) {
        let _ = self.read_all();
        // A terminal's master, and a pipe that a process outside of the job holds, never reach their end.
        self.queue.lock().ended = true;
        self.changed.notify_all();
        self.wait_written(deadline);
    }

    fn wait_written(&self, deadline: Instant) -> bool {
        let is_unwritten = |queue: &mut Queue| queue.waiting_bytes > 0 || queue.writing;
        let mut queue = self.queue.lock();
        let left = deadline.saturating_duration_since(Instant::now());
        let _ = self.changed.wait_while_for(&mut queue, is_unwritten, left);
        !is_unwritten(&mut queue)
    }

    /// The regular file that this stream is written to, with its length after all output read so far is written.
    pub(super) fn file_once_written(&self, deadline: Instant) -> Option<OpenFile> {
        let file = regular_file(self.sink.as_fd())?;
        self.wait_written(deadline).then_some(())?;
        Some(OpenFile { size_bytes: rustix::fs::fstat(&self.sink).ok()?.st_size.cast_unsigned(), ..file })
    }
}
