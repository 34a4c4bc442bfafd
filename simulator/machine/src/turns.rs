//! Turns of processes on a device that has restored one.
//!
//! After the driver's checkpoint and restore, a GPU does not switch between the kernels of two processes any more: one runs
//! to its end, those of other processes wait, and a kernel that keeps another process waiting for 5 s fails (Xid 109; seen
//! with 580.159.04, docs/measurements.md). When all processes that were restored have ended, the GPU does so again.
//!
//! The device has two files then. A process has a record lock on the first one while kernels of it run, and on the second
//! one while it is the next. The kernel drops such a lock with its process, and the child of a fork does not have it
//! (fcntl(2)). A process loses its locks with the first descriptor of the file that it closes: here alone is it opened.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;

/// How often a process that waits looks whether it is its turn.
const WAIT_POLL: Duration = Duration::from_micros(200);
/// How often a running kernel looks whether another process waits.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The turns on a device, as this process takes them.
pub struct Turns {
    running: PathBuf,
    next: PathBuf,
    limit: Duration,
    mine: Mutex<Mine>,
}

/// What this process has of the device.
#[derive(Default)]
struct Mine {
    /// Both files, as long as a kernel runs or waits.
    files: Option<Files>,
    running: usize,
    waiting: usize,
    is_next: bool,
    /// Since when another process has waited for the kernels that run now.
    kept_since: Option<Instant>,
}

struct Files {
    running: File,
    next: File,
}

impl Turns {
    /// On a GPU. `limit` is how long a kernel may keep another process waiting.
    #[must_use]
    pub fn of(machine: &Path, id: usize, limit: Duration) -> Self {
        let file = |name| machine.join(format!("{name}{id}"));
        Self { running: file("running"), next: file("next"), limit, mine: Mutex::default() }
    }

    /// The device has restored a process.
    ///
    /// # Errors
    /// The kernel's.
    pub fn begin(&self) -> io::Result<()> {
        // The first file comes last: it is what the others look for.
        for path in [&self.next, &self.running] {
            OpenOptions::new().append(true).create(true).open(path)?;
        }
        Ok(())
    }

    /// The device is torn down, which no process had open.
    ///
    /// # Errors
    /// The kernel's.
    pub fn end(&self) -> io::Result<()> {
        for path in [&self.running, &self.next] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until a kernel of this process may run, as long as `is_wanted`; `None` on a device that switches between
    /// kernels, and for a kernel that is not wanted any more.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take(&self, is_wanted: &dyn Fn() -> bool) -> io::Result<Option<Turn<'_>>> {
        if !self.running.try_exists()? {
            return Ok(None);
        }
        self.mine().waiting += 1;
        let taken = loop {
            match self.mine().try_take(self) {
                Ok(false) if is_wanted() => std::thread::sleep(WAIT_POLL),
                taken => break taken,
            }
        };
        let mut mine = self.mine();
        mine.waiting -= 1;
        mine.let_go_if_idle();
        Ok(taken?.then(|| Turn { turns: self, began: Instant::now(), next_look_ms: AtomicU64::new(0) }))
    }

    fn mine(&self) -> MutexGuard<'_, Mine> {
        self.mine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mine {
    /// Whether one more kernel of this process runs now. Beside others of it, unless another process waits.
    fn try_take(&mut self, turns: &Turns) -> io::Result<bool> {
        if self.running > 0 {
            if self.keeps_another()? {
                return Ok(false);
            }
        } else {
            let open = |path| OpenOptions::new().write(true).open(path);
            if self.files.is_none() {
                self.files = Some(Files { running: open(&turns.running)?, next: open(&turns.next)? });
            }
            let Some(files) = &self.files else { return Ok(false) };
            self.is_next = self.is_next || try_lock(&files.next)?;
            if !self.is_next || !try_lock(&files.running)? {
                return Ok(false);
            }
            self.is_next = false;
            fcntl_lock(&files.next, FlockOperation::NonBlockingUnlock)?;
        }
        self.running += 1;
        Ok(true)
    }

    /// Whether another process waits for the kernels that run.
    fn keeps_another(&mut self) -> io::Result<bool> {
        let Some(files) = &self.files else { return Ok(false) };
        let is_free = try_lock(&files.next)?;
        if is_free {
            fcntl_lock(&files.next, FlockOperation::NonBlockingUnlock)?;
            self.kept_since = None;
        } else {
            self.kept_since.get_or_insert_with(Instant::now);
        }
        Ok(!is_free)
    }

    /// Closes the files when nothing of this process runs or waits: a checkpoint must not find them open.
    fn let_go_if_idle(&mut self) {
        if self.running == 0 && self.waiting == 0 {
            *self = Self::default();
        }
    }
}

/// Whether the lock is this process's now, which also holds if it was so before.
fn try_lock(file: &File) -> io::Result<bool> {
    match fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A running kernel's turn.
pub struct Turn<'a> {
    turns: &'a Turns,
    began: Instant,
    /// When to look for others again, in milliseconds since it began.
    next_look_ms: AtomicU64,
}

impl Turn<'_> {
    /// Whether the kernel has kept another process waiting for too long. Cheap enough to be asked all the time.
    pub fn is_over(&self) -> bool {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if now_ms < self.next_look_ms.load(Ordering::Relaxed) {
            return false;
        }
        self.next_look_ms.store(now_ms + LOOK_INTERVAL.as_millis() as u64, Ordering::Relaxed);
        let mut mine = self.turns.mine();
        let keeps_another = mine.keeps_another().unwrap_or(false);
        keeps_another && mine.kept_since.is_some_and(|since| since.elapsed() >= self.turns.limit)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut mine = self.turns.mine();
        mine.running -= 1;
        if mine.running == 0 {
            mine.kept_since = None;
            if let Some(files) = &mine.files
                && fcntl_lock(&files.running, FlockOperation::NonBlockingUnlock).is_err()
            {
                // Closing them has the same effect.
                mine.files = None;
                mine.is_next = false;
            }
        }
        mine.let_go_if_idle();
    }
}
