//! The init: PID 1 of the job's namespace, with one thread until it has forked the job. It sets up the namespace, then
//! serves the launcher's requests and reaps children until the launcher closes the control socket.

use super::descriptors::OpenDescriptors;
use super::messages::{Names, Reply, Request, receive, retry_for_memory, send};
use super::peek::Peeker;
use super::recorder::Journal;
use super::spawn::{CONTROL_FD, PRIVATE_NETWORK};
use super::written_files::{DRAIN_INTERVAL, STAMP_INTERVAL, Tracker};
use super::{
    FIRST_JOB_PID, PRIVATE_TMPFS, event_counters, job_start, private_dir, socket_options, subreaper, survey,
    terminals,
};
use crate::sys::authentic::FileKey;
use crate::sys::privileges;
use ckpt_snapshot::ProcessTree;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, WaitOptions, wait};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where CRIU looks for plugins. It has to be a directory; this one has no `*.so`.
const NO_PLUGINS: &str = "/proc/self/ns";
/// The init ends this long after its launcher at the latest, seconds.
const END_LIMIT_S: u32 = 5;
/// Time for killed processes to end before the init does.
const FINISH_LIMIT: Duration = Duration::from_millis(500);
/// Time for the last record after that. The launcher waits for both (`INIT_END_TIMEOUT`).
const FLUSH_LIMIT: Duration = Duration::from_millis(300);

/// Runs the init with the arguments of the process. Never returns: the namespace ends with the init.
pub fn init_main() -> ! {
    // SAFETY: the launcher put the control socket there, and nothing else in this process has touched it.
    let control = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
    let control = UnixStream::from(control);
    let code = match serve(&control) {
        Ok(()) => 0,
        Err(error) => {
            let _ = send(&control, &Reply::Failed { message: error.to_string() }, &[]);
            1
        }
    };
    std::process::exit(code)
}

fn serve(control: &UnixStream) -> io::Result<()> {
    rustix::io::fcntl_setfd(control, rustix::io::FdFlags::CLOEXEC)?;
    close_from(CONTROL_FD + 1, 0);
    let (mut child_ended, wake) = UnixStream::pair()?;
    child_ended.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGCHLD, wake)?;
    end_after_launcher()?;
    let private_dir =
        set_up().map_err(|(step, error)| io::Error::other(format!("cannot {step}: {error}")))?;
    send(control, &Reply::Ready { private_dir: private_dir.to_string_lossy().into_owned() }, &[])?;
    let mut init = Init {
        control,
        private_dir,
        root_pid: None,
        criu: HashMap::new(),
        tracker: None,
        peeker: Peeker::default(),
        has_own_terminals: false,
    };
    let mut is_writing = false;
    loop {
        let events = wait_for_work(control, &child_ended, init.tracker.as_ref(), is_writing)?;
        // The launcher has died. This process may be killed next: the end of the job is recorded at once.
        if events.contains(PollFlags::HUP) {
            init.finish();
            return Ok(());
        }
        // Drained before reaping: a child that ends in between wakes the loop again.
        while child_ended.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
        is_writing = init.drain();
        init.reap()?;
        if !events.is_empty() {
            let Some((request, fds)) = receive(control)? else {
                init.finish();
                return Ok(());
            };
            init.answer(request, fds)?;
        }
    }
}

/// Waits for a request, the end of a child, or files that the job writes. While the job writes, events are collected for
/// a moment, so that the init does not wake for each. Returns the events of the connection to the launcher.
fn wait_for_work(
    control: &UnixStream,
    child_ended: &UnixStream,
    tracker: Option<&Tracker>,
    is_writing: bool,
) -> io::Result<PollFlags> {
    let mut waits = vec![PollFd::new(control, PollFlags::IN), PollFd::new(child_ended, PollFlags::IN)];
    waits.extend(tracker.filter(|_| !is_writing).map(|tracker| PollFd::new(tracker.events(), PollFlags::IN)));
    let interval = tracker.map(|_| if is_writing { DRAIN_INTERVAL } else { STAMP_INTERVAL });
    let interval = interval.and_then(|interval| Timespec::try_from(interval).ok());
    retry_for_memory(|| poll(&mut waits, interval.as_ref()))?;
    Ok(waits[0].revents())
}

/// When the launcher has died, the kernel sends SIGTERM, and the init notices the closed socket at once. If the init is
/// stuck then, it ends some seconds later, and the job with it. Others send SIGTERM too, such as `timeout` to all processes of its
/// group.
fn end_after_launcher() -> io::Result<()> {
    extern "C" fn end_soon(_: libc::c_int) {
        // SAFETY: async-signal-safe (signal-safety(7)).
        unsafe { libc::alarm(END_LIMIT_S) };
    }
    extern "C" fn end_if_launcher_has_died(_: libc::c_int) {
        let mut control = libc::pollfd { fd: CONTROL_FD, events: libc::POLLRDHUP, revents: 0 };
        // All calls are async-signal-safe (signal-safety(7)).
        // SAFETY: a plain call.
        let errno_at = unsafe { libc::__errno_location() };
        // SAFETY: the thread's own.
        let errno = unsafe { *errno_at };
        // SAFETY: one `pollfd`.
        match unsafe { libc::poll(&raw mut control, 1, 0) } {
            0 => {}
            // SAFETY: a plain call. Another signal has come meanwhile.
            ..0 => drop(unsafe { libc::alarm(1) }),
            // SAFETY: ends this process only.
            1.. => unsafe { libc::_exit(1) },
        }
        // SAFETY: the thread's own. What was interrupted may be about to look at it.
        unsafe { *errno_at = errno };
    }
    for (signal, handler) in
        [(libc::SIGTERM, end_soon as extern "C" fn(libc::c_int)), (libc::SIGALRM, end_if_launcher_has_died)]
    {
        // SAFETY: the handlers only make async-signal-safe calls.
        if unsafe { libc::signal(signal, handler as libc::sighandler_t) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Closes (or, with `CLOSE_RANGE_CLOEXEC`, marks) every descriptor from `first` on.
pub(super) fn close_from(first: i32, flags: u32) {
    // SAFETY: no `OwnedFd` with a number in this range exists yet in a process that was just executed; with the
    // close-on-exec flag nothing is closed now. A kernel without the call leaves them open: harmless until a dump.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, flags) };
}

type Step<T> = Result<T, (&'static str, io::Error)>;

trait AtStep<T> {
    fn at_step(self, step: &'static str) -> Step<T>;
}

impl<T, E: Into<io::Error>> AtStep<T> for Result<T, E> {
    fn at_step(self, step: &'static str) -> Step<T> {
        self.map_err(|error| (step, error.into()))
    }
}

fn set_up() -> Step<PathBuf> {
    // Mounts of the system propagate into the namespace, but not out of it.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", slave).at_step("separate the job's mounts from the system's")?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    mount("proc", "/proc", "proc", plain | MountFlags::NOEXEC, c"").at_step("mount /proc for the job")?;
    let private = private_dir().at_step("create a private directory")?;
    mount("tmpfs", &private, "tmpfs", plain, PRIVATE_TMPFS).at_step("mount a private directory")?;
    if std::env::args().nth(2).as_deref() == Some(PRIVATE_NETWORK) {
        loopback_up().at_step("bring up the loopback interface")?;
        // As most systems have it for their network. Else the job could not be resumed with a socket of that kind, if it
        // has allowed them itself. Without the right to do so, there are none.
        let _ = std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    }
    Ok(private)
}

fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    // SAFETY: `ifreq` is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[..2].copy_from_slice(&[*b"l", *b"o"].map(libc::c_char::from_ne_bytes));
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which outlives the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

struct Init<'a> {
    control: &'a UnixStream,
    private_dir: PathBuf,
    /// The root of the job's tree; its end is reported.
    root_pid: Option<i32>,
    /// CRIU processes, with the descriptors that they open through /proc/1/fd.
    criu: HashMap<i32, Vec<OwnedFd>>,
    tracker: Option<Tracker>,
    peeker: Peeker,
    /// Whether terminals that the job makes are in its own namespace.
    has_own_terminals: bool,
}

impl Init<'_> {
    /// Records the files that the job has written.
    /// Returns whether there were events.
    fn drain(&mut self) -> bool {
        let criu = &self.criu;
        self.tracker.as_mut().is_some_and(|tracker| tracker.drain(&|pid| criu.contains_key(&pid)))
    }

    /// Ends the job, and records the last files that it has written.
    fn finish(&mut self) {
        if self.tracker.is_none() {
            return;
        }
        let _ = send_signal(-1, false, libc::SIGKILL);
        let deadline = Instant::now() + FINISH_LIMIT;
        // At once: this process may be killed as well. A process that is being killed may still complete a system call, so that
        // this is not the end.
        self.drain();
        self.record(false, FINISH_LIMIT);
        // Orphans are children of the init: without children, no process of the job is left.
        let is_over = loop {
            match wait(WaitOptions::NOHANG) {
                Err(rustix::io::Errno::CHILD) => break true,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) if Instant::now() >= deadline => break false,
                Ok(None) | Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        self.drain();
        self.record(is_over, FLUSH_LIMIT);
    }

    /// Waits until all files that the job has written are recorded, and the end of the job if `is_end`.
    fn record(&self, is_end: bool, limit: Duration) {
        if let Some(tracker) = &self.tracker {
            if is_end {
                tracker.record_end();
            }
            tracker.flush(limit);
        }
    }

    fn reap(&mut self) -> io::Result<()> {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let pid = pid.as_raw_nonzero().get();
            let code = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => code,
                (None, Some(signal)) => 128 + signal,
                (None, None) => continue,
            };
            let was_criu = self.criu.remove(&pid).is_some();
            if was_criu || self.root_pid == Some(pid) {
                send(self.control, &Reply::Exited { pid, code }, &[])?;
            }
        }
        Ok(())
    }

    /// Serves one request. A failed request is answered; an error means that the answer could not be sent.
    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>) -> io::Result<()> {
        match self.perform(request, fds) {
            Ok((reply, None)) => send(self.control, &reply, &[]),
            Ok((reply, Some(socket))) => send(self.control, &reply, &[socket.as_fd()]),
            Err((step, error)) => {
                send(self.control, &Reply::Failed { message: format!("cannot {step}: {error}") }, &[])
            }
        }
    }

    fn descriptors(&mut self, limit: Duration) -> Step<Reply> {
        let criu: Vec<i32> = self.criu.keys().copied().collect();
        let open = OpenDescriptors::find(&criu).at_step("look at the job's descriptors")?;
        let queues =
            self.peeker.look(&open.sockets).at_step("look at the queues of the job's unix sockets")?;
        let (socket_options, unread_sockets) = socket_options::read(&open.sockets, Instant::now() + limit);
        let event_counters = event_counters::read(&open.eventfds);
        Ok(Reply::Descriptors { queues, socket_options, unread_sockets, event_counters })
    }

    fn perform(&mut self, request: Request, mut fds: Vec<OwnedFd>) -> Step<(Reply, Option<OwnedFd>)> {
        let done = |warnings| Ok((Reply::Done { warnings }, None));
        match request {
            Request::StartJob { argv, variables, terminal, stdio } => {
                let argv: Vec<_> = argv.into_iter().map(OsString::from_vec).collect();
                let variables = variables.into_iter().map(|(name, value)| (name, OsString::from_vec(value)));
                let command = job_start::JobCommand { argv, variables: variables.collect(), stdio, fds };
                let terminal = self.terminal(terminal)?;
                set_last_pid(FIRST_JOB_PID).at_step("choose the job's PIDs")?;
                let reply =
                    job_start::start(&command, terminal, &self.private_dir).at_step("start the job")?;
                if let Reply::Started { root_pid, .. } = reply {
                    self.root_pid = Some(root_pid);
                }
                Ok((reply, None))
            }
            Request::Criu { argv, terminal, with_library } => {
                let argv: Vec<_> = argv.into_iter().map(OsString::from_vec).collect();
                let terminal = self.terminal(terminal)?;
                let library = if with_library { fds.pop() } else { None };
                let kept: Vec<OwnedFd> = fds.into_iter().chain(terminal).collect();
                self.start_criu(&argv, kept, library).at_step("start CRIU")
            }
            Request::RestoreReaperProgram { command_pid } => {
                job_start::restore_reaper_program(&self.private_dir, command_pid)
                    .at_step("restore the program of the job's root")?;
                done(Vec::new())
            }
            Request::MakeSubreaper { root_pid } => {
                subreaper::make_subreaper(root_pid).at_step("make the job's root adopt orphans")?;
                done(Vec::new())
            }
            Request::Adopt { root_pid } => {
                self.root_pid = Some(root_pid);
                done(Vec::new())
            }
            Request::Signal { pid, group, signal } => {
                send_signal(pid, group, signal).at_step("send a signal to the job")?;
                done(Vec::new())
            }
            Request::TrackFiles { cwd, excluded } => {
                let cwd = PathBuf::from(OsString::from_vec(cwd));
                let excluded = excluded.into_iter().map(|path| OsString::from_vec(path).into()).collect();
                let (tracker, unwatched) = Tracker::start(excluded, &cwd).at_step("watch the job's files")?;
                self.tracker = Some(tracker);
                Ok((Reply::Tracking { unwatched }, None))
            }
            Request::WrittenFiles { key } => Ok((self.written_files(fds, key), None)),
            Request::Survey => {
                let criu: Vec<i32> = self.criu.keys().copied().collect();
                Ok((survey::scan(&criu, self.root_pid).at_step("survey the job's processes")?, None))
            }
            Request::QueuedBytes { sockets } => Ok((survey::queues(&sockets), None)),
            Request::Descriptors { limit_ms } => {
                Ok((self.descriptors(Duration::from_millis(limit_ms))?, None))
            }
            Request::SetNames(names) => self.set_names(&names).and_then(|()| done(Vec::new())),
            Request::Apply { tree } => done(apply(&tree)),
        }
    }

    /// A file of ours is mounted at `/etc/hosts`, for the job only.
    fn set_names(&self, names: &Names) -> Step<()> {
        let file = self.private_dir.join("hosts");
        let write = || {
            std::fs::write(&file, &names.hosts)?;
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644))
        };
        write().at_step("write the names of machines for the job")?;
        mount_bind(&file, "/etc/hosts").at_step("replace /etc/hosts for the job")?;
        rustix::system::sethostname(names.hostname.as_bytes()).at_step("set the name of the job's machine")
    }

    /// Opens the terminal that ckpt-run gives to the job. Without one, the job has terminals of its own.
    fn terminal(&mut self, path: Option<String>) -> Step<Option<OwnedFd>> {
        if path.is_none() && !std::mem::replace(&mut self.has_own_terminals, true) {
            // Without the right to do so, the terminals are the system's: a resume may find their numbers in use.
            let _ = terminals::separate();
        }
        path.map(|path| terminals::open(&path)).transpose().at_step("open the job's terminal")
    }

    fn written_files(&mut self, fds: Vec<OwnedFd>, key: FileKey) -> Reply {
        self.drain();
        let journal = fds.into_iter().next().map(|fd| Journal::new(fd.into(), key));
        let written = self.tracker.as_mut().map(|tracker| tracker.next(journal));
        let (paths, is_complete) = written.unwrap_or_default();
        Reply::Written { paths, is_complete }
    }

    fn start_criu(
        &mut self,
        argv: &[OsString],
        kept: Vec<OwnedFd>,
        library: Option<OwnedFd>,
    ) -> io::Result<(Reply, Option<OwnedFd>)> {
        // Created here and not in the launcher: CRIU opens directories as /proc/<creator of the socket>/fd/N, and the
        // launcher has no PID in this namespace.
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        // A group of its own: for a pre-dump CRIU forks, and a signal has to reach both.
        command.process_group(0);
        command.args(arguments).arg(theirs.as_raw_fd().to_string());
        // CRIU caches kernel features there; the cache is wrong for other users.
        if !rustix::process::getuid().is_root() {
            command.env_remove("XDG_RUNTIME_DIR");
        }
        // Its plugin for CUDA would checkpoint processes that are off their GPUs already.
        command.env("CRIU_LIBS_DIR", NO_PLUGINS);
        command.env_remove("LD_PRELOAD");
        if let Some(library) = &library {
            command.env("LD_PRELOAD", format!("/proc/self/fd/{}", library.as_raw_fd()));
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let fds: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
        let mut inherited = fds.clone();
        inherited.extend(library.iter().chain([&theirs]).map(AsRawFd::as_raw_fd));
        let keep_open = move || {
            for &fd in &inherited {
                // SAFETY: a plain system call on an integer, allowed between fork and exec.
                if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            privileges::hand_on()
        };
        // SAFETY: the closure only makes system calls and reads memory allocated before.
        unsafe { command.pre_exec(keep_open) };
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
        self.criu.insert(pid, kept);
        Ok((Reply::CriuStarted { pid, fds }, Some(ours)))
    }
}

/// Restores what CRIU does not. Returns what could not be restored.
fn apply(tree: &ProcessTree) -> Vec<String> {
    let mut warnings = survey::set_affinity(&tree.affinity);
    warnings.extend(socket_options::set(&tree.socket_options));
    warnings.extend(event_counters::restore(&tree.event_counters));
    if let Err(error) = set_last_pid(tree.last_pid.max(FIRST_JOB_PID)) {
        warnings.push(format!("cannot set the job's next PID: {error}"));
    }
    warnings
}

fn set_last_pid(last_pid: i32) -> io::Result<()> {
    std::fs::write(Path::new("/proc/sys/kernel/ns_last_pid"), last_pid.to_string())
}

fn send_signal(pid: i32, group: bool, signal: i32) -> io::Result<()> {
    if pid == -1 {
        // All processes but this one. If there are none, the job has just ended.
        // SAFETY: a plain system call on integers.
        if unsafe { libc::kill(-1, signal) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) };
    }
    let pid =
        Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().get() > 1).ok_or(io::ErrorKind::InvalidInput)?;
    let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
    match group {
        true => rustix::process::kill_process_group(pid, signal)?,
        false => rustix::process::kill_process(pid, signal)?,
    }
    Ok(())
}
