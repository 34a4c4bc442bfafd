//! The job's standard streams. The job never holds ours: it gets pipes, or a terminal of its own, and the launcher
//! relays. So a snapshot has nothing in it that belongs to somebody else's terminal or log, and a resumed job writes
//! to wherever the resuming `ckpt-run` writes.

use ckpt_snapshot::{OpenFile, StdioKind, StdioRecord, TtyRecord};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::namespace::StdioSource;

/// A relay reads no further ahead than this while its output is not taken.
const QUEUE_LIMIT_BYTES: usize = 1 << 20;
const STEP_BYTES: usize = 64 << 10;

/// The launcher's side of the job's standard streams.
pub struct Stdio {
    kinds: [StdioKind; 3],
    /// The job's ends of its pipes, by descriptor number; stderr may share stdout's.
    job_ends: [Option<Arc<OwnedFd>>; 3],
    terminal: Option<Terminal>,
    outputs: Vec<Arc<Output>>,
    input: Option<Arc<Input>>,
    forwarder: Option<JoinHandle<()>>,
    _raw_mode: Option<RawMode>,
}

struct Terminal {
    master: Arc<OwnedFd>,
    slave_path: String,
    record: TtyRecord,
    /// Held so that the terminal stays usable while the job, for a moment, has it open nowhere.
    _slave: OwnedFd,
}

/// One stream from the job to us.
struct Output {
    /// Which descriptors of the job it serves.
    job_fds: Vec<u32>,
    /// The name under which CRIU knows the pipe.
    inode: u64,
    /// `None` once our own output is closed: the job then finds its end closed too, as it would without us.
    source: Mutex<Option<Arc<OwnedFd>>>,
    sink: File,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// Something has been taken from `waiting` and is being written.
    writing: bool,
    ended: bool,
}

struct Input {
    /// Where the input began in its file, when it is a regular one.
    start: Option<u64>,
    /// Bytes put into the job's pipe; held while it is written to, so that it agrees with what is in the pipe.
    forwarded_bytes: Mutex<u64>,
    /// The job's end of its pipe, kept to ask what it has not read yet.
    pipe: Option<Arc<OwnedFd>>,
    /// Our end; taken by the thread that forwards, so that the job sees the end of the input.
    writer: Mutex<Option<OwnedFd>>,
    /// The thread that forwards ends when the other end of this is closed: the next life of the job has its own.
    over: OwnedFd,
    end: Mutex<Option<OwnedFd>>,
    /// When Ctrl-C or its like was last typed for the job.
    interrupted: Mutex<Option<Instant>>,
}

impl Stdio {
    /// Makes the job's ends: as ours are, or as `recorded` in the snapshot that is resumed.
    ///
    /// # Errors
    /// When pipes or a terminal cannot be made.
    pub fn prepare(recorded: Option<&[StdioRecord]>) -> io::Result<Self> {
        let own = |fd: usize| own_stream(fd);
        let kind_now =
            |fd: usize| if rustix::termios::isatty(own(fd)) { StdioKind::Tty } else { StdioKind::Pipe };
        let recorded_kind = |fd: usize| {
            recorded
                .and_then(|records| records.iter().find(|record| record.fd as usize == fd))
                .map(|record| record.kind)
        };
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
            self.outputs.push(Arc::new(Output::new(job_fds, Arc::new(reader), fd)?));
        }
        if let Some(terminal) = &self.terminal {
            let on_terminal = |fd: &usize| self.kinds[*fd] == StdioKind::Tty;
            let job_fds: Vec<u32> = [1, 2].iter().filter(|fd| on_terminal(fd)).map(|&fd| fd as u32).collect();
            // Without an output on it, what the terminal prints (echo, /dev/tty) goes to where the keys come from.
            let ours = job_fds.first().map_or(0, |&fd| fd as usize);
            self.outputs.push(Arc::new(Output::new(job_fds, Arc::clone(&terminal.master), ours)?));
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

    /// The name under which CRIU knows the job's terminal.
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

    /// Lets go of the job's ends, which it holds by now, and begins to relay. An input that is a regular file is
    /// taken from where the resumed job had stopped reading.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(&mut self, recorded: Option<&[StdioRecord]>) -> io::Result<()> {
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
            // In the background, reading from the terminal would stop us.
            if !own_terminal || in_foreground() {
                if master.is_some() && own_terminal {
                    self._raw_mode = RawMode::enter();
                }
                self.forwarder = Some(spawn("input", move || input.forward(master.as_deref()))?);
            }
        }
        self.resize();
        Ok(())
    }

    /// Hands the size of our terminal on to the job's.
    pub fn resize(&self) {
        let Some(terminal) = &self.terminal else { return };
        let ours = [0, 1, 2].map(own_stream).into_iter().find(|fd| rustix::termios::isatty(fd));
        if let Some(Ok(size)) = ours.map(rustix::termios::tcgetwinsize) {
            let _ = rustix::termios::tcsetwinsize(&terminal.master, size);
        }
    }

    /// With the job standing still: takes over everything that it has written, and says where the streams are.
    /// Waits at most `limit` for regular files to be written.
    ///
    /// # Errors
    /// When a pipe cannot be read.
    pub fn record(&self, limit: Duration) -> io::Result<(Vec<StdioRecord>, Option<TtyRecord>)> {
        let deadline = Instant::now() + limit;
        self.outputs.iter().try_for_each(|output| output.take_all())?;
        let mut records = Vec::new();
        for fd in 0..3_u32 {
            let output = self.outputs.iter().find(|output| output.job_fds.contains(&fd));
            let input_pipe = self.input.as_ref().filter(|_| fd == 0).and_then(|input| input.pipe.as_ref());
            let inode = match (self.kinds[fd as usize], input_pipe, output) {
                (StdioKind::Tty, ..) | (_, None, None) => 0,
                (_, Some(pipe), _) => rustix::fs::fstat(pipe)?.st_ino,
                (_, None, Some(output)) => output.inode,
            };
            let file = output.and_then(|output| output.file_once_written(deadline));
            let consumed_bytes = match (fd, &self.input) {
                (0, Some(input)) => input.consumed_bytes(),
                _ => None,
            };
            records.push(StdioRecord { fd, kind: self.kinds[fd as usize], inode, file, consumed_bytes });
        }
        Ok((records, self.terminal.as_ref().map(|terminal| terminal.record.clone())))
    }

    /// When Ctrl-C or its like was last typed for the job at a terminal that passes every key through.
    #[must_use]
    pub fn interrupted(&self) -> Option<Instant> {
        *self.input.as_ref()?.interrupted.lock()
    }

    /// Once the job has ended: writes what is left of its output, at most for `limit`, and leaves our input alone.
    pub fn finish(mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        self.leave_input();
        if let Some(Err(_)) = self.forwarder.take().map(JoinHandle::join) {
            tracing::warn!("the job's input was not forwarded to its end");
        }
        for output in &self.outputs {
            let _ = output.take_all();
            // A terminal's master, and a pipe that a process outside still holds, never end by themselves.
            output.queue.lock().ended = true;
            output.changed.notify_all();
            output.wait_written(deadline);
        }
    }

    /// Nothing more of our input is taken.
    fn leave_input(&self) {
        if let Some(input) = &self.input {
            drop(input.end.lock().take());
        }
    }
}

impl Drop for Stdio {
    /// A life that could not begin must not take the next one's input.
    fn drop(&mut self) {
        self.leave_input();
    }
}

/// The name under which CRIU knows a terminal.
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

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("relay-{name}")).spawn(work)
}

/// A pipe whose reading end is ours or the job's; both ends close on exec.
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
        let _slave = rustix::fs::open(&slave_path, flags, rustix::fs::Mode::empty())?;
        // What the user's terminal does with lines and keys, the job's does too.
        if let Some(Ok(settings)) = [0, 1, 2]
            .map(own_stream)
            .into_iter()
            .find(|fd| rustix::termios::isatty(fd))
            .map(rustix::termios::tcgetattr)
        {
            rustix::termios::tcsetattr(&master, OptionalActions::Now, &settings)?;
        }
        Ok(Self { master: Arc::new(master), slave_path, record, _slave })
    }
}

impl Output {
    fn new(job_fds: Vec<u32>, source: Arc<OwnedFd>, ours: usize) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&source)?;
        rustix::fs::fcntl_setfl(&source, flags | OFlags::NONBLOCK)?;
        let sink = File::from(own_stream(ours).try_clone_to_owned()?);
        let inode = rustix::fs::fstat(&source)?.st_ino;
        let source = Mutex::new(Some(source));
        Ok(Self { job_fds, inode, source, sink, queue: Mutex::default(), changed: Condvar::new() })
    }

    /// Reads once; `None` when there is nothing at the moment, or never again.
    fn read_some(&self, queue: &mut Queue) -> io::Result<Option<usize>> {
        let mut buffer = vec![0; STEP_BYTES];
        let Some(source) = self.source.lock().clone() else { return Ok(None) };
        match rustix::io::read(&source, &mut buffer[..]) {
            Ok(0) => queue.ended = true,
            Ok(read) => {
                buffer.truncate(read);
                queue.waiting.push_back(buffer);
                queue.waiting_bytes += read;
                self.changed.notify_all();
                return Ok(Some(read));
            }
            // A terminal whose last user is gone.
            Err(rustix::io::Errno::IO) => queue.ended = true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        self.changed.notify_all();
        Ok(None)
    }

    fn take_all(&self) -> io::Result<()> {
        let mut queue = self.queue.lock();
        while self.read_some(&mut queue)?.is_some() {}
        Ok(())
    }

    fn read_loop(&self) {
        loop {
            let Some(source) = self.source.lock().clone() else { return };
            let _ = poll(&mut [PollFd::new(&source, PollFlags::IN)], None);
            drop(source);
            let mut queue = self.queue.lock();
            while queue.waiting_bytes >= QUEUE_LIMIT_BYTES && !queue.ended {
                self.changed.wait(&mut queue);
            }
            if !queue.ended && self.read_some(&mut queue).is_err() {
                queue.ended = true;
                self.changed.notify_all();
            }
            if queue.ended {
                return;
            }
        }
    }

    fn write_loop(&self) {
        let mut is_reported = false;
        let mut queue = self.queue.lock();
        loop {
            if let Some(chunk) = queue.waiting.pop_front() {
                queue.writing = true;
                drop(queue);
                match (&self.sink).write_all(&chunk) {
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                        drop(self.source.lock().take());
                    }
                    // A full disk under a log: the job need not die of it.
                    Err(error) if !is_reported => {
                        tracing::warn!("the job's output cannot be written and is dropped: {error}");
                        is_reported = true;
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

    fn wait_written(&self, deadline: Instant) -> bool {
        let mut queue = self.queue.lock();
        while queue.waiting_bytes > 0 || queue.writing {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let _ = self.changed.wait_for(&mut queue, left);
        }
        true
    }

    /// The regular file that this stream is written to, with its length once everything taken so far is written.
    fn file_once_written(&self, deadline: Instant) -> Option<OpenFile> {
        let file = regular_file(self.sink.as_fd())?;
        self.wait_written(deadline).then_some(())?;
        Some(OpenFile { size_bytes: rustix::fs::fstat(&self.sink).ok()?.st_size.cast_unsigned(), ..file })
    }
}

/// The regular file behind a descriptor, with its present length.
#[must_use]
pub fn regular_file(fd: BorrowedFd) -> Option<OpenFile> {
    let stat = rustix::fs::fstat(fd).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_nlink == 0 {
        return None;
    }
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    Some(OpenFile { path: path.to_str()?.to_owned(), size_bytes: stat.st_size.cast_unsigned() })
}

/// The regular files that our own stdout and stderr append to: a resumed job's output goes on in them.
#[must_use]
pub fn appended_files() -> Vec<OpenFile> {
    let appends =
        |fd: &BorrowedFd| rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::APPEND));
    [1, 2].map(own_stream).into_iter().filter(appends).filter_map(regular_file).collect()
}

impl Input {
    fn new(pipe: Option<(Arc<OwnedFd>, OwnedFd)>) -> io::Result<Self> {
        let own = own_stream(0);
        let is_file = FileType::from_raw_mode(rustix::fs::fstat(own)?.st_mode) == FileType::RegularFile;
        let position = || rustix::fs::seek(own, rustix::fs::SeekFrom::Current(0)).ok();
        // A job that is started again by the same launcher has its input from there again.
        static START: OnceLock<Option<u64>> = OnceLock::new();
        let start = *START.get_or_init(|| is_file.then(position).flatten());
        let (over, end) = self::pipe()?;
        let (pipe, writer) = pipe.unzip();
        if let Some(writer) = &writer {
            // A full pipe must not be waited for with the count locked.
            rustix::fs::fcntl_setfl(writer, rustix::fs::fcntl_getfl(writer)? | OFlags::NONBLOCK)?;
        }
        Ok(Self {
            start,
            forwarded_bytes: Mutex::new(0),
            pipe,
            writer: Mutex::new(writer),
            over,
            end: Mutex::new(Some(end)),
            interrupted: Mutex::new(None),
        })
    }

    /// What the job has taken: what was put into its pipe and is not there any more.
    fn consumed_bytes(&self) -> Option<u64> {
        self.start?;
        let forwarded_bytes = self.forwarded_bytes.lock();
        let in_pipe = rustix::io::ioctl_fionread(self.pipe.as_ref()?).ok()?;
        Some(forwarded_bytes.saturating_sub(in_pipe))
    }

    fn skip(&self, consumed_bytes: u64) -> io::Result<()> {
        if let Some(start) = self.start {
            let mut file = File::from(own_stream(0).try_clone_to_owned()?);
            file.seek(SeekFrom::Start(start + consumed_bytes))?;
            *self.forwarded_bytes.lock() = consumed_bytes;
        }
        Ok(())
    }

    /// Writes everything, waiting for room without holding the count.
    fn put(&self, mut to: &File, mut bytes: &[u8]) -> io::Result<()> {
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

    /// Waits until something can be done; says whether anybody still wants it.
    fn wait(&self, what: PollFd) -> bool {
        let mut waits = [what, PollFd::new(&self.over, PollFlags::IN)];
        loop {
            match poll(&mut waits, None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
                Ok(_) => return waits[1].revents().is_empty(),
            }
        }
    }

    /// The job's own terminal turns some keys into signals, of which nobody else hears.
    fn notice_interrupt(&self, master: Option<&OwnedFd>, typed: &[u8]) {
        let Some(Ok(settings)) = master.map(rustix::termios::tcgetattr) else { return };
        let signals =
            [SpecialCodeIndex::VINTR, SpecialCodeIndex::VQUIT].map(|key| settings.special_codes[key]);
        let is_on = settings.local_modes.contains(LocalModes::ISIG);
        if is_on && typed.iter().any(|key| signals.contains(key)) {
            *self.interrupted.lock() = Some(Instant::now());
        }
    }

    fn forward(&self, master: Option<&OwnedFd>) {
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
                    self.notice_interrupt(master, &buffer[..read]);
                    if self.put(&to, &buffer[..read]).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    }
}

fn in_foreground() -> bool {
    rustix::termios::tcgetpgrp(own_stream(0)).is_ok_and(|foreground| foreground == rustix::process::getpgrp())
}

/// Our terminal's settings from before it was is_reported to pass every key through, while the job's own terminal interprets
/// them.
static BEFORE_RAW: Mutex<Option<Termios>> = Mutex::new(None);

/// Gives our terminal its settings back. To be called before the process ends, however it ends.
pub fn restore_terminal() {
    if let Some(before) = BEFORE_RAW.lock().take() {
        let _ = rustix::termios::tcsetattr(own_stream(0), OptionalActions::Drain, &before);
    }
}

struct RawMode;

impl RawMode {
    fn enter() -> Option<Self> {
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
