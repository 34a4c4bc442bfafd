//! Makes system calls of ckpt-run fail, in every way in which the kernel lets them fail.
//!
//! `system-call-faults PID READY LOG SEED AFTER-MS ONE-IN MOST KIND...` traces the shell PID, which is about to become a
//! ckpt-run, and makes the file READY when it does. It follows the launcher's threads and its init, and leaves every
//! other program alone when that is executed: CRIU has to trace the job itself. One in ONE-IN of the calls that can have
//! a fault of a KIND has one, MOST at most, from so many milliseconds after the start on. LOG has a line for each.
//!
//! The kinds:
//! - `interrupted`: EINTR, with nothing done
//! - `short`: fewer bytes than asked for, of files, pipes and streams
//! - `late`: the call begins some milliseconds later
//! - `refused`: an error of a machine without memory, descriptors, processes or space, or with a broken disk
//! - `NUMBER:ERRNO`: this error, of this system call only
//!
//! With the one kind `listed`, nothing is done, and LOG has a line `NUMBER:ERRNO` for each fault that a call can have.
//!
//! It ends with the last process that it traces.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Write;
use std::time::{Duration, Instant};

use libc::{c_int, c_long};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// The longest delay of a late call.
const LATEST_MS: u64 = 20;
/// How often calls that wait for their time are looked at.
const LATE_POLL: Duration = Duration::from_millis(1);

/// What a call is given to, as far as it decides which faults can be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    /// A file on a disk or in a tmpfs.
    File,
    /// A pipe, or a unix stream.
    Stream,
    /// A file that the kernel makes up: a read may be short, a write is whole.
    Virtual,
    Other,
}

/// What is done to a call.
#[derive(Clone, Copy)]
enum Fault {
    Error(c_int),
    /// The register with the length, and its new value.
    Short(u64),
    Late(Duration),
}

/// Where a thread is.
#[derive(Default)]
struct Thread {
    /// Within a system call: an entry has been seen, its exit not.
    within: bool,
    /// What its exit has to return.
    result: Option<i64>,
    /// The length to put back.
    length: Option<u64>,
    /// Whether it has been at a stop for a system call.
    known: bool,
}

struct Tracer {
    threads: HashMap<Pid, Thread>,
    /// Stopped until then.
    late: Vec<(Instant, Pid)>,
    random: fastrand::Rng,
    one_in: u64,
    most: u64,
    kinds: Vec<String>,
    /// The lines of `listed`.
    listed: BTreeSet<(c_long, c_int)>,
    log: File,
    after: Duration,
    /// When faults begin; `None` until the shell has become ckpt-run.
    begin: Option<Instant>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, pid, ready, log, seed, after_ms, one_in, most, kinds @ ..] = &arguments[..] else {
        panic!("PID READY LOG SEED AFTER-MS ONE-IN MOST KIND...");
    };
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let mut tracer = Tracer {
        threads: HashMap::new(),
        late: Vec::new(),
        random: fastrand::Rng::with_seed(number(seed)),
        one_in: number(one_in),
        most: number(most),
        kinds: kinds.to_vec(),
        listed: BTreeSet::new(),
        log: File::options().create(true).append(true).open(log).expect("the log"),
        after: Duration::from_millis(number(after_ms)),
        begin: None,
    };
    let pid = Pid::from_raw(pid.parse().expect("a PID"));
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC;
    ptrace::seize(pid, options).expect("seize");
    // Without a stop there is nothing to continue from: a shell that polls for a file makes one soon.
    ptrace::interrupt(pid).expect("interrupt");
    tracer.threads.insert(pid, Thread::default());
    File::create(ready).expect("the file that says so");
    tracer.run();
}

impl Tracer {
    fn run(&mut self) {
        loop {
            let flags = if self.late.is_empty() {
                WaitPidFlag::__WALL
            } else {
                WaitPidFlag::__WALL | WaitPidFlag::WNOHANG
            };
            match waitpid(None, Some(flags)) {
                Ok(WaitStatus::StillAlive) => self.wake(),
                Ok(status) => self.stopped(status),
                Err(Errno::ECHILD) => return,
                Err(error) => panic!("wait: {error}"),
            }
        }
    }

    /// Lets those late calls begin whose time has come.
    fn wake(&mut self) {
        std::thread::sleep(LATE_POLL);
        let now = Instant::now();
        let (due, later) = self.late.drain(..).partition(|(then, _)| *then <= now);
        self.late = later;
        for (_, pid) in due {
            go_on(pid, None);
        }
    }

    fn stopped(&mut self, status: WaitStatus) {
        match status {
            WaitStatus::PtraceSyscall(pid) => self.at_system_call(pid),
            WaitStatus::PtraceEvent(pid, _, libc::PTRACE_EVENT_EXEC) => self.at_exec(pid),
            WaitStatus::PtraceEvent(pid, ..) => go_on(pid, None),
            WaitStatus::Stopped(pid, signal) => go_on(pid, Some(signal)),
            WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..) => {
                self.threads.remove(&pid);
            }
            _ => {}
        }
    }

    /// Keeps ckpt-run itself, and leaves every other program.
    fn at_exec(&mut self, pid: Pid) {
        let is_ours = fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ends_with("ckpt-run"));
        if is_ours && self.begin.is_none() {
            self.begin = Some(Instant::now() + self.after);
        }
        if is_ours {
            return go_on(pid, None);
        }
        self.threads.remove(&pid);
        // It may have been killed.
        let _ = ptrace::detach(pid, None);
    }

    fn at_system_call(&mut self, pid: Pid) {
        // A thread that has been killed has no registers.
        let Ok(mut registers) = ptrace::getregs(pid) else { return go_on(pid, None) };
        let thread = self.threads.entry(pid).or_default();
        // The first stop of a new thread is the end of the call that made it.
        let is_entry = if thread.known {
            !thread.within
        } else {
            registers.rax.cast_signed() == -i64::from(libc::ENOSYS)
        };
        (thread.known, thread.within) = (true, is_entry);
        if !is_entry {
            let (result, length) = (thread.result.take(), thread.length.take());
            if result.is_some() || length.is_some() {
                registers.rax = result.map_or(registers.rax, i64::cast_unsigned);
                registers.rdx = length.unwrap_or(registers.rdx);
                let _ = ptrace::setregs(pid, registers);
            }
            return go_on(pid, None);
        }
        let Some((fault, what)) = self.choose(pid, &registers) else { return go_on(pid, None) };
        let _ = writeln!(self.log, "{pid} {what}");
        let thread = self.threads.entry(pid).or_default();
        match fault {
            Fault::Late(delay) => return self.late.push((Instant::now() + delay, pid)),
            Fault::Error(errno) => {
                // No call has this number: the kernel does nothing.
                registers.orig_rax = u64::MAX;
                thread.result = Some(-i64::from(errno));
            }
            Fault::Short(length) => {
                thread.length = Some(registers.rdx);
                registers.rdx = length;
            }
        }
        let _ = ptrace::setregs(pid, registers);
        go_on(pid, None);
    }

    /// The fault of this call, and what the log says of it.
    fn choose(&mut self, pid: Pid, registers: &libc::user_regs_struct) -> Option<(Fault, String)> {
        let begun = self.begin.is_some_and(|begin| Instant::now() >= begin);
        let kind = self.random.choice(&self.kinds)?.clone();
        // What concerns one call only is chosen among the calls with its number.
        let only = kind.split_once(':').map(|(number, errno)| {
            (number.parse::<c_long>().expect("a number"), errno.parse::<c_int>().expect("a number"))
        });
        if !begun || only.is_some_and(|(number, _)| number != registers.orig_rax.cast_signed()) {
            return None;
        }
        if self.most == 0 || self.random.u64(..self.one_in) != 0 || is_loader(pid, registers.rip) {
            return None;
        }
        let call = Call::new(pid, registers)?;
        if kind == "listed" {
            self.list(&call);
            return None;
        }
        let fault = match &*kind {
            _ if only.is_some() => {
                let (_, errno) = only?;
                call.faults().any(|one| one == errno).then_some(Fault::Error(errno))?
            }
            "interrupted" => call.can_be_interrupted().then_some(Fault::Error(libc::EINTR))?,
            "short" => Fault::Short(call.shorter(&mut self.random)?),
            "late" => Fault::Late(Duration::from_millis(self.random.u64(1..LATEST_MS))),
            "refused" => Fault::Error(*self.random.choice(call.errors())?),
            other => panic!("{other} is no kind of fault"),
        };
        self.most -= 1;
        let what = match fault {
            Fault::Error(errno) => format!("{:?}", Errno::from_raw(errno)),
            Fault::Short(length) => format!("{length} of {}", registers.rdx),
            Fault::Late(delay) => format!("{delay:?}"),
        };
        Some((fault, format!("{kind} {} ({}) {what}", registers.orig_rax, call.path)))
    }
}

impl Tracer {
    /// Writes down which faults the call can have.
    fn list(&mut self, call: &Call) {
        for errno in call.faults() {
            if self.listed.insert((call.number, errno)) {
                writeln!(self.log, "{}:{errno}", call.number).expect("a line of the log");
            }
        }
    }
}

/// Continues to the next system call. The thread may have been killed.
fn go_on(pid: Pid, signal: Option<Signal>) {
    let _ = ptrace::syscall(pid, signal);
}

/// A system call that is about to begin.
struct Call {
    number: c_long,
    /// Its third argument: the length, for calls that have one.
    length: u64,
    target: Target,
    flags: u64,
    path: String,
}

impl Call {
    fn new(pid: Pid, registers: &libc::user_regs_struct) -> Option<Self> {
        let number = registers.orig_rax.cast_signed();
        let path = fs::read_link(format!("/proc/{pid}/fd/{}", registers.rdi.cast_signed()))
            .map_or_else(|_| String::new(), |path| path.to_string_lossy().into_owned());
        let direct = is_direct(pid, registers.rdi);
        let target = match &*path {
            _ if direct => Target::Other,
            path if ["/proc", "/sys", "/dev"].iter().any(|dir| path.starts_with(dir)) => Target::Virtual,
            path if path.starts_with('/') => Target::File,
            path if path.starts_with("pipe:") || is_stream(pid, path) => Target::Stream,
            _ => Target::Other,
        };
        let flags = if number == libc::SYS_openat { registers.rdx } else { registers.rsi };
        Some(Self { number, length: registers.rdx, target, flags, path })
    }

    fn can_be_interrupted(&self) -> bool {
        match self.number {
            libc::SYS_futex => self.flags & 0x7f == 0 || self.flags & 0x7f == 9,
            libc::SYS_fcntl => self.flags == libc::F_SETLKW as u64 || self.flags == libc::F_OFD_SETLKW as u64,
            // The standard library does not repeat an interrupted `opendir`, which the handlers' SA_RESTART does.
            libc::SYS_openat => self.flags & libc::O_DIRECTORY as u64 == 0,
            number => INTERRUPTIBLE.contains(&number),
        }
    }

    /// All errors that it can have.
    fn faults(&self) -> impl Iterator<Item = c_int> {
        self.can_be_interrupted().then_some(libc::EINTR).into_iter().chain(self.errors().iter().copied())
    }

    /// A length below the one that was asked for, if the kernel may transfer less.
    fn shorter(&self, random: &mut fastrand::Rng) -> Option<u64> {
        let may = match self.number {
            libc::SYS_read | libc::SYS_pread64 | libc::SYS_recvfrom | libc::SYS_readv => {
                matches!(self.target, Target::File | Target::Stream | Target::Virtual)
            }
            libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendto | libc::SYS_writev => {
                matches!(self.target, Target::File | Target::Stream)
            }
            _ => false,
        };
        (may && self.length > 1).then(|| random.u64(1..self.length))
    }

    /// Errors of a machine in trouble, as the kernel reports them for this call.
    fn errors(&self) -> &'static [c_int] {
        use libc::{EAGAIN, EIO, EMFILE, ENFILE, ENOLCK, ENOMEM, ENOSPC};
        let is_file = self.target == Target::File;
        match self.number {
            libc::SYS_read | libc::SYS_pread64 | libc::SYS_readv if is_file => &[EIO],
            libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_writev if is_file => &[EIO, ENOSPC],
            libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_copy_file_range => &[EIO, ENOSPC],
            libc::SYS_fallocate => &[ENOSPC],
            libc::SYS_mkdirat | libc::SYS_mkdir | libc::SYS_linkat | libc::SYS_symlinkat => &[EIO, ENOSPC],
            libc::SYS_renameat | libc::SYS_renameat2 | libc::SYS_rename => &[EIO, ENOSPC],
            libc::SYS_unlinkat | libc::SYS_unlink | libc::SYS_getdents64 => &[EIO],
            libc::SYS_openat if self.flags & libc::O_CREAT as u64 != 0 => &[EMFILE, ENFILE, ENOMEM, ENOSPC],
            libc::SYS_openat | libc::SYS_openat2 | libc::SYS_pipe2 | libc::SYS_socket => {
                &[EMFILE, ENFILE, ENOMEM]
            }
            libc::SYS_socketpair | libc::SYS_eventfd2 | libc::SYS_epoll_create1 => &[EMFILE, ENFILE, ENOMEM],
            libc::SYS_memfd_create | libc::SYS_timerfd_create | libc::SYS_pidfd_open => {
                &[EMFILE, ENFILE, ENOMEM]
            }
            libc::SYS_inotify_init1 | libc::SYS_fanotify_init | libc::SYS_io_uring_setup => &[EMFILE, ENOMEM],
            libc::SYS_accept4 => &[EMFILE, ENFILE],
            libc::SYS_clone | libc::SYS_clone3 | libc::SYS_fork | libc::SYS_vfork => &[EAGAIN, ENOMEM],
            libc::SYS_mount | libc::SYS_fsopen | libc::SYS_fsmount | libc::SYS_open_tree => &[ENOMEM],
            libc::SYS_epoll_ctl | libc::SYS_sendmsg => &[ENOMEM],
            libc::SYS_statx | libc::SYS_newfstatat | libc::SYS_readlink | libc::SYS_readlinkat => {
                &[EIO, ENOMEM]
            }
            libc::SYS_ftruncate | libc::SYS_fchmod | libc::SYS_fchmodat | libc::SYS_fchown => &[EIO, ENOSPC],
            libc::SYS_fchownat | libc::SYS_utimensat | libc::SYS_fsetxattr | libc::SYS_mknodat => {
                &[EIO, ENOSPC]
            }
            libc::SYS_fstatfs | libc::SYS_statfs | libc::SYS_lseek | libc::SYS_faccessat2 => &[EIO],
            libc::SYS_mprotect | libc::SYS_process_vm_readv | libc::SYS_recvmsg => &[ENOMEM],
            libc::SYS_unshare | libc::SYS_setns => &[ENOMEM, ENOSPC],
            libc::SYS_execve => &[ENOMEM, EIO],
            libc::SYS_flock => &[ENOLCK],
            libc::SYS_fcntl if self.flags == libc::F_DUPFD_CLOEXEC as u64 => &[EMFILE],
            libc::SYS_bind | libc::SYS_listen | libc::SYS_connect | libc::SYS_setsockopt => &[ENOMEM],
            _ => &[],
        }
    }
}

/// Calls that a signal can interrupt before they have done anything.
const INTERRUPTIBLE: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_flock,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_copy_file_range,
    libc::SYS_io_uring_enter,
    libc::SYS_getrandom,
];

/// Whether the instruction is one of the dynamic loader, which gives up at the first error.
fn is_loader(pid: Pid, instruction: u64) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().any(|line| {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let range = range.map(|(begin, end)| (u64::from_str_radix(begin, 16), u64::from_str_radix(end, 16)));
        let within = |(begin, end)| begin <= instruction && instruction < end;
        matches!(range, Some((Ok(begin), Ok(end))) if within((begin, end))) && line.contains("/ld-linux")
    })
}

/// Whether a descriptor is open for direct I/O, whose lengths are whole blocks.
fn is_direct(pid: Pid, descriptor: u64) -> bool {
    let info =
        fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", descriptor.cast_signed())).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or(0);
    flags & libc::O_DIRECT != 0
}

/// Whether `socket:[INODE]` is a unix stream.
fn is_stream(pid: Pid, path: &str) -> bool {
    let Some(inode) = path.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) else {
        return false;
    };
    let sockets = fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(4);
        fields.next() == Some("0001") && fields.nth(1) == Some(inode)
    })
}
