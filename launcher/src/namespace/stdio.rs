//! The job's standard streams. The job never holds the launcher's streams: it gets pipes or its own terminal, and the
//! launcher relays. So a snapshot does not depend on the launcher's terminal or log file, and a resumed job writes to the
//! streams of the `ckpt-run` that resumed it.

mod input;
mod output;
mod tail;

use crate::namespace::StdioSource;
use crate::sys::path_text::path_text;
use ckpt_snapshot::{OpenFile, StdioKind, StdioRecord, TtyRecord};
use input::{Input, RawMode, in_foreground};
pub use input::{check_input, restore_terminal};
use output::Output;
use parking_lot::Mutex;
use rustix::fs::{FileType, OFlags};
use rustix::io::retry_on_intr;
use rustix::termios::OptionalActions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
pub use tail::Tail;

const STEP_BYTES: usize = 64 << 10;

/// The launcher's side of the job's standard streams.
pub struct Stdio {
    kinds: [StdioKind; 3],
    /// The job's ends of its pipes, by descriptor number; stderr may share stdout's.
    job_ends: [Option<Arc<OwnedFd>>; 3],
    terminal: Option<Terminal>,
    outputs: Vec<Arc<Output>>,
    tail: Arc<Tail>,
    input: Option<Arc<Input>>,
    forwarder: Option<JoinHandle<()>>,
    _raw_mode: Option<RawMode>,
}

struct Terminal {
    master: Arc<OwnedFd>,
    slave_path: String,
    record: TtyRecord,
    /// Keeps the terminal usable while no process of the job has it open.
    _slave: OwnedFd,
}

impl Stdio {
    /// Creates the job's ends, of the same kinds as the launcher's streams, or as `recorded` in the snapshot to resume.
    ///
    /// # Errors
    /// When pipes or a terminal cannot be created.
    pub fn prepare(recorded: Option<&[StdioRecord]>) -> io::Result<Self> {
        let own = |fd: usize| own_stream(fd);
        let kind_now =
            |fd: usize| if rustix::termios::isatty(own(fd)) { StdioKind::Tty } else { StdioKind::Pipe };
        let recorded_kind = |fd: usize| Some(recorded?.iter().find(|record| record.fd as usize == fd)?.kind);
        let kinds = [0, 1, 2].map(|fd| recorded_kind(fd).unwrap_or_else(|| kind_now(fd)));
        let shared = match recorded {
            None => kinds[1] == StdioKind::Pipe && kinds[2] == StdioKind::Pipe && same_file(own(1), own(2))?,
            Some(records) => shared_pipe(records),
        };
        let mut stdio = Self {
            kinds,
            job_ends: [None, None, None],
            terminal: None,
            outputs: Vec::new(),
            tail: Arc::default(),
            input: None,
            forwarder: None,
            _raw_mode: None,
        };
        if kinds.contains(&StdioKind::Tty) {
            stdio.terminal = Some(Terminal::open()?);
        }
        stdio.make_pipes(shared)?;
        Ok(stdio)
    }

    fn make_pipes(&mut self, shared: bool) -> io::Result<()> {
        if self.kinds[0] == StdioKind::Pipe {
            let (reader, writer) = pipe()?;
            let reader = Arc::new(reader);
            self.job_ends[0] = Some(Arc::clone(&reader));
            self.input = Some(Arc::new(Input::new(Some((reader, writer)))?));
        }
        for fd in [1, 2] {
            if self.kinds[fd] != StdioKind::Pipe || (fd == 2 && shared) {
                continue;
            }
            let (reader, writer) = pipe()?;
            let writer = Arc::new(writer);
            self.job_ends[fd] = Some(Arc::clone(&writer));
            let mut job_fds = vec![fd as u32];
            if fd == 1 && shared {
                self.job_ends[2] = Some(writer);
                job_fds.push(2);
            }
            self.outputs.push(Arc::new(Output::new(job_fds, Arc::new(reader), fd, Arc::clone(&self.tail))?));
        }
        if let Some(terminal) = &self.terminal {
            let on_terminal = |fd: &usize| self.kinds[*fd] == StdioKind::Tty;
            let job_fds: Vec<u32> = [1, 2].iter().filter(|fd| on_terminal(fd)).map(|&fd| fd as u32).collect();
            // If neither output is the terminal, its output (echo, /dev/tty) goes to the terminal of stdin.
            let ours = job_fds.first().map_or(0, |&fd| fd as usize);
            let (master, tail) = (Arc::clone(&terminal.master), Arc::clone(&self.tail));
            self.outputs.push(Arc::new(Output::new(job_fds, master, ours, tail)?));
            if self.kinds[0] == StdioKind::Tty {
                self.input = Some(Arc::new(Input::new(None)?));
            }
        }
        Ok(())
    }

    /// Path of the job's terminal, if it has one.
    #[must_use]
    pub fn terminal_path(&self) -> Option<String> {
        self.terminal.as_ref().map(|terminal| terminal.slave_path.clone())
    }

    /// The name by which CRIU identifies the job's terminal.
    #[must_use]
    pub fn terminal_key(&self) -> Option<String> {
        self.terminal.as_ref().map(|terminal| terminal_key(&terminal.record))
    }

    /// The job's three streams and the descriptors to send along with them.
    #[must_use]
    pub fn for_start(&self) -> ([StdioSource; 3], Vec<BorrowedFd<'_>>) {
        let mut fds = Vec::new();
        let sources = [0, 1, 2].map(|fd: usize| match &self.job_ends[fd] {
            Some(end) => {
                fds.push(end.as_fd());
                StdioSource::Sent(fds.len() - 1)
            }
            None => StdioSource::Terminal,
        });
        (sources, fds)
    }

    /// The job's end of the pipe that serves its descriptor `fd`.
    #[must_use]
    pub fn job_end(&self, fd: u32) -> Option<BorrowedFd<'_>> {
        self.job_ends.get(fd as usize)?.as_ref().map(|end| end.as_fd())
    }

    /// Closes the job's ends, which the job has by now, and starts relaying. An input that is a regular file continues
    /// where the resumed job had stopped reading. With `on_interrupt`, the key Ctrl-C at the user's terminal calls it,
    /// and does not reach the job, unless a program of the job reads single keys.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        &mut self,
        recorded: Option<&[StdioRecord]>,
        on_interrupt: Option<Box<dyn Fn() + Send>>,
    ) -> io::Result<()> {
        self.job_ends = [None, None, None];
        for output in &self.outputs {
            for half in [Output::read_loop as fn(&Output), Output::write_loop] {
                let output = Arc::clone(output);
                spawn("output", move || half(&output))?;
            }
        }
        let consumed =
            recorded.and_then(|records| records.iter().find(|record| record.fd == 0)?.consumed_bytes);
        if let Some(input) = self.input.clone() {
            input.skip(consumed.unwrap_or(0))?;
            let master = self.terminal.as_ref().map(|terminal| Arc::clone(&terminal.master));
            let own_terminal = rustix::termios::isatty(own_stream(0));
            // A background process is stopped when it reads from the terminal.
            if !own_terminal || in_foreground() {
                if master.is_some() && own_terminal {
                    self._raw_mode = RawMode::enter();
                }
                self.forwarder = Some(spawn("input", move || {
                    input.forward(master.as_deref(), on_interrupt.as_deref());
                })?);
            }
        }
        self.resize();
        Ok(())
    }

    /// Sets the size of the job's terminal to the size of the launcher's.
    pub fn resize(&self) {
        let Some(terminal) = &self.terminal else { return };
        if let Some(Ok(size)) = own_terminal().map(rustix::termios::tcgetwinsize) {
            let _ = rustix::termios::tcsetwinsize(&terminal.master, size);
        }
    }

    /// Called while the job is frozen: reads all output that the job has written, and records the state of the streams.
    /// Waits at most `limit` until regular files are written.
    ///
    /// # Errors
    /// When a pipe cannot be read.
    pub fn record(&self, limit: Duration) -> io::Result<(Vec<StdioRecord>, Option<TtyRecord>)> {
        let deadline = Instant::now() + limit;
        self.outputs.iter().try_for_each(|output| output.read_all())?;
        let mut records = Vec::new();
        for fd in 0..3_u32 {
            let output = self.outputs.iter().find(|output| output.job_fds.contains(&fd));
            let input = self.input.as_ref().filter(|_| fd == 0);
            let input_pipe = input.and_then(|input| input.pipe.as_ref());
            let inode = match (self.kinds[fd as usize], input_pipe, output) {
                (StdioKind::Tty, ..) | (_, None, None) => 0,
                (_, Some(pipe), _) => rustix::fs::fstat(pipe)?.st_ino,
                (_, None, Some(output)) => output.inode,
            };
            let file = output.and_then(|output| output.file_once_written(deadline));
            let consumed_bytes = input.and_then(|input| input.consumed_bytes());
            let (kind, input) = (self.kinds[fd as usize], input.and_then(|input| input.record()));
            records.push(StdioRecord { fd, kind, inode, file, consumed_bytes, input });
        }
        Ok((records, self.terminal.as_ref().map(|terminal| terminal.record.clone())))
    }

    /// The job's last output.
    #[must_use]
    pub fn tail(&self) -> &Arc<Tail> {
        &self.tail
    }

    /// When an interrupt key (such as Ctrl-C) was last typed for the job at a terminal in raw mode.
    #[must_use]
    pub fn interrupted(&self) -> Option<Instant> {
        *self.input.as_ref()?.interrupted.lock()
    }

    /// When the reader of the job's output closed it last (`ckpt-run CMD | head`).
    #[must_use]
    pub fn closed(&self) -> Option<Instant> {
        self.outputs.iter().filter_map(|output| *output.closed_at.lock()).max()
    }

    /// Types Ctrl-C at the job's terminal. Returns whether the job has one as its input.
    #[must_use]
    pub fn type_interrupt(&self) -> bool {
        let terminal = self.terminal.as_ref().filter(|_| self.kinds[0] == StdioKind::Tty);
        terminal.is_some_and(|terminal| input::type_interrupt(&terminal.master).is_ok())
    }

    /// Called when the job has ended: writes the remaining output, at most for `limit`, and stops reading the input.
    pub fn finish(mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        self.stop_input();
        if let Some(Err(_)) = self.forwarder.take().map(JoinHandle::join) {
            tracing::warn!("the thread that forwards the job's input panicked");
        }
        self.outputs.iter().for_each(|output| output.finish(deadline));
    }

    /// Stops reading the input.
    fn stop_input(&self) {
        if let Some(input) = &self.input {
            input.stop();
        }
    }
}

impl Drop for Stdio {
    /// A session that failed to start must not consume the input of the next one.
    fn drop(&mut self) {
        self.stop_input();
    }
}

/// The name by which CRIU identifies a terminal.
#[must_use]
pub fn terminal_key(record: &TtyRecord) -> String {
    format!("tty[{:x}:{:x}]", record.rdev, record.dev)
}

fn own_stream(fd: usize) -> BorrowedFd<'static> {
    match fd {
        0 => rustix::stdio::stdin(),
        1 => rustix::stdio::stdout(),
        _ => rustix::stdio::stderr(),
    }
}

/// The launcher's stdout or stderr, if it is the file at `path` and open for writing: it may be cut even by a user who may not
/// open it, such as one for whom systemd opens a log.
#[must_use]
pub fn own_output(path: &Path) -> Option<BorrowedFd<'static>> {
    own_outputs(path).next()
}

fn own_outputs(path: &Path) -> impl Iterator<Item = BorrowedFd<'static>> {
    let inode = |file: rustix::fs::Stat| (file.st_dev, file.st_ino);
    let wanted = rustix::fs::lstat(path).ok().map(inode);
    let is_it = move |fd: &BorrowedFd| {
        let is_writable =
            rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.intersects(OFlags::WRONLY | OFlags::RDWR));
        is_writable && wanted.is_some() && rustix::fs::fstat(fd).ok().map(inode) == wanted
    };
    [1, 2].map(own_stream).into_iter().filter(is_it)
}

/// The lengths of the files of the launcher's stdout and stderr when the job did not run last: what follows are messages of
/// the launcher.
static MESSAGES_FROM: Mutex<[Option<u64>; 2]> = Mutex::new([None; 2]);

/// The job does not run. Until it does, only the launcher writes to its own stdout and stderr.
pub fn messages_begin() {
    let length = |fd: usize| u64::try_from(rustix::fs::fstat(own_stream(fd)).ok()?.st_size).ok();
    *MESSAGES_FROM.lock() = [1, 2].map(length);
}

/// Where the messages of the launcher begin in the file at `path`, to which it appends them (bytes).
#[must_use]
pub fn messages_from(path: &Path) -> Option<u64> {
    let output = own_output(path)?;
    if !rustix::fs::fcntl_getfl(output).is_ok_and(|flags| flags.contains(OFlags::APPEND)) {
        return None;
    }
    MESSAGES_FROM.lock()[usize::from(output.as_raw_fd() != 1)]
}

/// The file at `path` was cut to `bytes`, and what follows are messages.
pub fn messages_moved(path: &Path, bytes: u64) {
    let mut from = MESSAGES_FROM.lock();
    own_outputs(path).for_each(|output| from[usize::from(output.as_raw_fd() != 1)] = Some(bytes));
}

/// The first of the launcher's streams that is a terminal.
fn own_terminal() -> Option<BorrowedFd<'static>> {
    [0, 1, 2].map(own_stream).into_iter().find(|fd| rustix::termios::isatty(fd))
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("relay-{name}")).spawn(work)
}

/// A pipe; both ends close on exec.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

fn same_file(one: BorrowedFd, other: BorrowedFd) -> io::Result<bool> {
    let (one, other) = (rustix::fs::fstat(one)?, rustix::fs::fstat(other)?);
    Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

/// Whether stdout and stderr were one pipe in the snapshot.
fn shared_pipe(records: &[StdioRecord]) -> bool {
    let pipe = |fd: u32| records.iter().find(|record| record.fd == fd && record.kind == StdioKind::Pipe);
    matches!((pipe(1), pipe(2)), (Some(one), Some(other)) if one.inode == other.inode)
}

impl Terminal {
    fn open() -> io::Result<Self> {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let slave_path = name.into_string().map_err(io::Error::other)?;
        let stat = rustix::fs::stat(&slave_path)?;
        let record = TtyRecord { rdev: stat.st_rdev, dev: stat.st_dev };
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let _slave = retry_on_intr(|| rustix::fs::open(&slave_path, flags, rustix::fs::Mode::empty()))?;
        // The job's terminal gets the settings of the user's terminal.
        if let Some(Ok(settings)) = own_terminal().map(rustix::termios::tcgetattr) {
            rustix::termios::tcsetattr(&master, OptionalActions::Now, &settings)?;
        }
        Ok(Self { master: Arc::new(master), slave_path, record, _slave })
    }
}

/// The regular file of a descriptor, with its current length.
#[must_use]
pub fn regular_file(fd: BorrowedFd) -> Option<OpenFile> {
    let stat = rustix::fs::fstat(fd).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_nlink == 0 {
        return None;
    }
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    Some(OpenFile { path: path_text(path), size_bytes: stat.st_size.cast_unsigned() })
}

/// The regular files that the launcher's standard streams are.
#[must_use]
pub fn own_files() -> Vec<OpenFile> {
    [0, 1, 2].map(own_stream).into_iter().filter_map(regular_file).collect()
}

/// The regular files that the launcher's stdout and stderr append to: a resumed job continues its output there.
#[must_use]
pub fn appended_files() -> Vec<OpenFile> {
    let appends =
        |fd: &BorrowedFd| rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::APPEND));
    [1, 2].map(own_stream).into_iter().filter(appends).filter_map(regular_file).collect()
}
