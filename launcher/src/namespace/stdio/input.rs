//! Forwarding the launcher's input to the job, whether a resume has the same input, and the raw mode of the launcher's
//! terminal.

use super::{STEP_BYTES, own_stream};
use ckpt_snapshot::{InputRecord, StdioRecord, size_text};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The launcher's input, forwarded to the job.
pub(super) struct Input {
    /// The start offset of the input, if it is a regular file.
    start: Option<u64>,
    /// Bytes written to the job's pipe. Locked during a write, so that the number agrees with the content of the pipe.
    forwarded_bytes: Mutex<u64>,
    /// The job's end of its pipe, kept to determine how much the job has not read yet.
    pub(super) pipe: Option<Arc<OwnedFd>>,
    /// The launcher's end; owned by the forwarding thread, so that the job sees the end of the input.
    writer: Mutex<Option<OwnedFd>>,
    /// The forwarding thread ends when the other end of this pipe (`stop_sender`) is closed. The next session of the job has
    /// its own thread.
    stop: OwnedFd,
    stop_sender: Mutex<Option<OwnedFd>>,
    /// When an interrupt key (such as Ctrl-C) was last typed for the job.
    pub(super) interrupted: Mutex<Option<Instant>>,
}

/// How much of what was consumed is compared, bytes.
const COMPARED_BYTES: u64 = 64 << 10;

/// The offset at which the launcher began to read its input, if that is a regular file. A job that the same launcher restarts
/// reads its input from the same offset.
fn file_start() -> Option<u64> {
    static START: OnceLock<Option<u64>> = OnceLock::new();
    let own = own_stream(0);
    let position = || rustix::fs::seek(own, rustix::fs::SeekFrom::Current(0)).ok();
    *START.get_or_init(|| (type_of_own()? == FileType::RegularFile).then(position).flatten())
}

fn type_of_own() -> Option<FileType> {
    Some(FileType::from_raw_mode(rustix::fs::fstat(own_stream(0)).ok()?.st_mode))
}

/// The hash of the last part of the first `consumed_bytes` of the input; `None` if it has not so much.
fn hash_of_last(start: u64, consumed_bytes: u64) -> Option<String> {
    let bytes = consumed_bytes.min(COMPARED_BYTES);
    let mut last = vec![0; usize::try_from(bytes).ok()?];
    let file = File::from(own_stream(0).try_clone_to_owned().ok()?);
    file.read_exact_at(&mut last, start + consumed_bytes - bytes).ok()?;
    Some(blake3::hash(&last).to_hex().to_string())
}

/// Checks that the launcher's input goes on with what the job has not consumed. Warns of a pipe, which cannot be checked.
///
/// # Errors
/// The job would read other input, or miss some.
pub fn check_input(recorded: &[StdioRecord]) -> anyhow::Result<()> {
    let Some(input) = recorded.iter().find(|record| record.fd == 0).and_then(|record| record.input.as_ref())
    else {
        return Ok(());
    };
    let read = size_text(input.consumed_bytes);
    let Some(wanted) = &input.last_hash else {
        tracing::warn!(
            "the job had read {read} of its input from a pipe before the snapshot: what this start has as its input follows that. A command that writes all of the input again makes the job read it twice; `ckpt-run … < FILE` continues where the job had stopped reading"
        );
        return Ok(());
    };
    if input.is_all {
        return Ok(());
    }
    let problem = match (file_start(), type_of_own()) {
        (Some(start), _) => match hash_of_last(start, input.consumed_bytes) {
            Some(found) if found == *wanted => return Ok(()),
            Some(_) => "this start has a file with other content as its input",
            None => "this start has a shorter file as its input",
        },
        (None, Some(FileType::Fifo | FileType::Socket)) => "this start has a pipe as its input",
        (None, Some(FileType::CharacterDevice)) if rustix::termios::isatty(own_stream(0)) => {
            "this start has a terminal as its input"
        }
        (None, _) => "this start has no input (/dev/null)",
    };
    anyhow::bail!(
        "the job reads its input from a file, of which it had read {read} at the snapshot and not all, and {problem}: the job would miss the rest or read something else. Start it with the same input (`ckpt-run … < FILE`), or begin again with --resume never"
    )
}

impl Input {
    pub(super) fn new(pipe: Option<(Arc<OwnedFd>, OwnedFd)>) -> io::Result<Self> {
        let start = file_start();
        let (stop, stop_sender) = super::pipe()?;
        let (pipe, writer) = pipe.unzip();
        if let Some(writer) = &writer {
            // A write must not block while the count is locked.
            rustix::fs::fcntl_setfl(writer, rustix::fs::fcntl_getfl(writer)? | OFlags::NONBLOCK)?;
        }
        Ok(Self {
            start,
            forwarded_bytes: Mutex::new(0),
            pipe,
            writer: Mutex::new(writer),
            stop,
            stop_sender: Mutex::new(Some(stop_sender)),
            interrupted: Mutex::new(None),
        })
    }

    /// How much the job has read: the bytes written to its pipe minus those that are still there.
    pub(super) fn consumed_bytes(&self) -> Option<u64> {
        self.start.and_then(|_| self.consumed())
    }

    fn consumed(&self) -> Option<u64> {
        let forwarded_bytes = self.forwarded_bytes.lock();
        let in_pipe = rustix::io::ioctl_fionread(self.pipe.as_ref()?).ok()?;
        Some(forwarded_bytes.saturating_sub(in_pipe))
    }

    /// What a resume compares its input with.
    pub(super) fn record(&self) -> Option<InputRecord> {
        let consumed_bytes = self.consumed().filter(|bytes| *bytes > 0)?;
        let Some(start) = self.start else {
            return Some(InputRecord { consumed_bytes, last_hash: None, is_all: false });
        };
        let end = start + consumed_bytes;
        let is_all = rustix::fs::fstat(own_stream(0)).is_ok_and(|file| file.st_size.cast_unsigned() <= end);
        Some(InputRecord { consumed_bytes, last_hash: hash_of_last(start, consumed_bytes), is_all })
    }

    pub(super) fn skip(&self, consumed_bytes: u64) -> io::Result<()> {
        if let Some(start) = self.start {
            let mut file = File::from(own_stream(0).try_clone_to_owned()?);
            file.seek(SeekFrom::Start(start + consumed_bytes))?;
            *self.forwarded_bytes.lock() = consumed_bytes;
        }
        Ok(())
    }

    /// Writes all bytes; does not hold the count while it waits for room.
    fn write_all(&self, mut to: &File, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut forwarded_bytes = self.forwarded_bytes.lock();
            match to.write(bytes) {
                Ok(written) => {
                    *forwarded_bytes += written as u64;
                    bytes = &bytes[written..];
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    drop(forwarded_bytes);
                    if !self.wait(PollFd::new(&to, PollFlags::OUT)) {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the forwarding thread.
    pub(super) fn stop(&self) {
        drop(self.stop_sender.lock().take());
    }

    /// Waits until `fd` is ready; returns `false` if forwarding was stopped.
    fn wait(&self, fd: PollFd) -> bool {
        let mut waits = [fd, PollFd::new(&self.stop, PollFlags::IN)];
        let polled = rustix::io::retry_on_intr(|| poll(&mut waits, None));
        polled.is_ok() && waits[1].revents().is_empty()
    }

    /// Records interrupt keys: the job's terminal turns them into signals that the launcher does not see.
    fn record_interrupt(&self, master: Option<&OwnedFd>, typed: &[u8]) {
        let Some(Ok(settings)) = master.map(rustix::termios::tcgetattr) else { return };
        let signals =
            [SpecialCodeIndex::VINTR, SpecialCodeIndex::VQUIT].map(|key| settings.special_codes[key]);
        let is_on = settings.local_modes.contains(LocalModes::ISIG);
        if is_on && typed.iter().any(|key| signals.contains(key)) {
            *self.interrupted.lock() = Some(Instant::now());
        }
    }

    pub(super) fn forward(&self, master: Option<&OwnedFd>, on_interrupt: Option<&(dyn Fn() + Send)>) {
        let Ok(mut from) = own_stream(0).try_clone_to_owned().map(File::from) else { return };
        let to = match master {
            Some(master) => master.try_clone().ok(),
            None => self.writer.lock().take(),
        };
        let Some(to) = to.map(File::from) else { return };
        let mut buffer = vec![0; STEP_BYTES];
        while self.wait(PollFd::new(&own_stream(0), PollFlags::IN)) {
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => {
                    let mut typed = &buffer[..read];
                    let kept;
                    if let (Some(master), Some(on_interrupt)) = (master, on_interrupt)
                        && let Some(others) = without_interrupts(master, typed)
                    {
                        (others.len()..read).for_each(|_| on_interrupt());
                        kept = others;
                        typed = &kept;
                    }
                    self.record_interrupt(master, typed);
                    if self.write_all(&to, typed).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    }
}

/// The typed keys without those for an interrupt; `None` if the job's programs want them all: they read single keys, or
/// have turned off signals.
fn without_interrupts(master: &OwnedFd, typed: &[u8]) -> Option<Vec<u8>> {
    let settings = rustix::termios::tcgetattr(master).ok()?;
    let key = settings.special_codes[SpecialCodeIndex::VINTR];
    let is_on = settings.local_modes.contains(LocalModes::ISIG | LocalModes::ICANON);
    is_on.then(|| typed.iter().copied().filter(|&one| one != key).collect())
}

/// Types the key for an interrupt.
pub(super) fn type_interrupt(master: &OwnedFd) -> io::Result<()> {
    let key = rustix::termios::tcgetattr(master)?.special_codes[SpecialCodeIndex::VINTR];
    rustix::io::write(master, &[key])?;
    Ok(())
}

pub(super) fn in_foreground() -> bool {
    rustix::termios::tcgetpgrp(own_stream(0)).is_ok_and(|foreground| foreground == rustix::process::getpgrp())
}

/// Our terminal's settings from before it was is_reported to pass every key through, while the job's own terminal interprets
/// them.
static BEFORE_RAW: Mutex<Option<Termios>> = Mutex::new(None);

/// Restores the settings of the launcher's terminal. Has to be called before the process ends in any way.
pub fn restore_terminal() {
    if let Some(before) = BEFORE_RAW.lock().take() {
        let _ = rustix::termios::tcsetattr(own_stream(0), OptionalActions::Drain, &before);
    }
}

pub(super) struct RawMode;

impl RawMode {
    pub(super) fn enter() -> Option<Self> {
        let terminal = own_stream(0);
        let before = rustix::termios::tcgetattr(terminal).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(terminal, OptionalActions::Drain, &raw).ok()?;
        *BEFORE_RAW.lock() = Some(before);
        Some(Self)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore_terminal();
    }
}
