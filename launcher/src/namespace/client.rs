//! The launcher's side of the conversation with the init.

use super::activity::Activity;
use super::ending;
use super::messages::{Names, Network, Reply, Request, StdioSource, receive, send};
use super::peek::PeekedQueue;
use super::spawn::{self, Spawned};
use crate::sys::authentic::FileKey;
use crate::sys::descriptor_limit;
use crate::sys::privileges::Privileges;
use crate::sys::runtime_dir::private;
use ckpt_snapshot::{AffinityGroup, EventCounter, ProcessMemory, ProcessTree, SocketOptions};
use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// An event that the init reports unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitEvent {
    /// The job's root, or a CRIU, ended.
    Exited {
        /// Its PID in the namespace.
        pid: i32,
        /// Its exit code, 128 + n for signal n.
        code: i32,
    },
    /// The init has ended, and all processes in the namespace with it.
    Ended,
}

/// The namespace cannot be created, or the init does not answer.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The kernel refuses the namespaces.
    #[error("cannot make a PID namespace for the job: {0}")]
    Create(io::Error),
    /// Capabilities are missing.
    #[error(
        "cannot make a PID namespace for the job and save it: user ID {uid} lacks {missing}. Give ckpt-run these capabilities, or run it as root; see `ckpt-run doctor`"
    )]
    Rights {
        /// The user ID of the launcher.
        uid: u32,
        /// Names and purposes.
        missing: String,
    },
    /// The launcher has no capabilities, and user namespaces are not allowed either.
    #[error(
        "cannot make a PID namespace for the job: user ID {uid} has no CAP_SYS_ADMIN, and may not make a user namespace either: {reason}. Run ckpt-run as root, or give it the capabilities that `ckpt-run doctor` lists, or allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    )]
    NoUserNamespace {
        /// The user ID of the launcher.
        uid: u32,
        /// The error of the system.
        reason: String,
    },
    /// The directory for the private mount cannot be created.
    #[error(
        "the job's processes need a private directory: {0}. Remove what is in the way, or ask the owner to do so"
    )]
    PrivateDir(io::Error),
    /// The init could not perform a request.
    #[error("{0}")]
    Refused(String),
    /// The init has ended.
    #[error("the job's namespace has ended")]
    Ended,
}

/// The job could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The command cannot be executed.
    #[error("cannot run the command: {0}")]
    Command(io::Error),
    /// The namespace failed.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
}

/// A running `criu swrk`.
pub struct CriuProcess {
    /// Its PID in the namespace.
    pub pid: i32,
    /// Its request socket.
    pub socket: OwnedFd,
    /// The numbers, in CRIU and in the init, of the descriptors that were sent along. The terminal's is the last.
    pub fds: Vec<i32>,
}

/// A survey of the job's processes.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Threads by the CPUs they may run on.
    pub affinity: Vec<AffinityGroup>,
    /// The last PID that was assigned.
    pub last_pid: i32,
    /// Memory that a dump would contain, bytes.
    pub memory_bytes: u64,
    /// PIDs of the processes.
    pub pids: Vec<i32>,
    /// Their memory, by PID, without device memory.
    pub processes: Vec<ProcessMemory>,
    /// Those of the processes that are not descendants of the job's root: a dump would not contain them.
    pub strays: Vec<i32>,
    /// Number of SysV shared memory segments, semaphores and message queues that a dump would not contain.
    pub lost_ipc: usize,
}

/// What the job has in its descriptors that CRIU does not save.
#[derive(Clone, Debug, Default)]
pub struct DescriptorState {
    /// The queues of unix sockets that have messages of length zero.
    pub queues: Vec<PeekedQueue>,
    /// Options of sockets.
    pub socket_options: Vec<SocketOptions>,
    /// Number of sockets of which the options could not be read, or not in time.
    pub unread_sockets: usize,
    /// Eventfds with a count that does not fit into 32 bits.
    pub event_counters: Vec<EventCounter>,
}

type Answer = (Reply, Vec<OwnedFd>);

/// The job's namespaces. Dropping this ends all processes in them, and reports those that do not end (see
/// [`super::is_ending`]).
pub struct Namespace {
    spawned: Arc<Spawned>,
    private_dir: String,
    /// One request at a time.
    requests: Mutex<(UnixStream, Receiver<Answer>)>,
    events: Receiver<InitEvent>,
}

impl Namespace {
    /// Creates the namespaces and their init, with a private mount at `private_dir` of a snapshot, see
    /// [`Self::private_dir`]. The calling thread has to live as long as the job: the init ends with it.
    ///
    /// # Errors
    /// [`NamespaceError::Rights`] and [`NamespaceError::NoUserNamespace`] when capabilities are missing,
    /// [`NamespaceError::Create`] when the kernel refuses the namespaces, [`NamespaceError::Refused`] when the set-up
    /// fails.
    pub fn create(network: Network, private_dir: Option<&str>) -> Result<Self, NamespaceError> {
        let rights = Privileges::detect();
        let uid = rustix::process::getuid().as_raw();
        let missing: Vec<_> =
            rights.missing().iter().map(|one| format!("{} ({})", one.name, one.why)).collect();
        if !missing.is_empty() {
            return Err(NamespaceError::Rights { uid, missing: missing.join(", ") });
        }
        if let Some(above) = private_dir.and_then(|dir| Path::new(dir).parent())
            && let Err(error) = private(above.to_owned())
            // The init covers a directory.
            && !std::fs::symlink_metadata(above).is_ok_and(|facts| facts.is_dir())
        {
            return Err(NamespaceError::PrivateDir(error));
        }
        Self::try_create(network, private_dir).map_err(|error| {
            let reason = match error {
                error if !rights.wants_user_namespace() => return error,
                NamespaceError::Create(error) => error.to_string(),
                error => error.to_string(),
            };
            NamespaceError::NoUserNamespace { uid, reason }
        })
    }

    fn try_create(network: Network, private_dir: Option<&str>) -> Result<Self, NamespaceError> {
        let (ours, theirs) = UnixStream::pair().map_err(NamespaceError::Create)?;
        let spawned = spawn::spawn_init(&theirs, network, private_dir).map_err(NamespaceError::Create)?;
        drop(theirs);
        descriptor_limit::restore_in(spawned.pid).map_err(|error| NamespaceError::Create(error.into()))?;
        let reader = ours.try_clone().map_err(NamespaceError::Create)?;
        let (answers, replies) = crossbeam_channel::unbounded();
        let (event_sender, events) = crossbeam_channel::unbounded();
        std::thread::Builder::new()
            .name("init-reader".to_owned())
            .spawn(move || read_replies(&reader, &answers, &event_sender))
            .map_err(NamespaceError::Create)?;
        let (requests, private_dir) = (Mutex::new((ours, replies)), String::new());
        let mut namespace = Self { spawned: Arc::new(spawned), private_dir, requests, events };
        match namespace.answer()? {
            (Reply::Ready { private_dir }, _) => {
                namespace.private_dir = private_dir;
                Ok(namespace)
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// The init's PID in the launcher's PID namespace: `/proc/PID/root` is the job's root directory.
    #[must_use]
    pub fn init_pid(&self) -> i32 {
        self.spawned.pid.as_raw_nonzero().get()
    }

    /// The directory of a small private tmpfs, from which the reaper's program was executed.
    #[must_use]
    pub fn private_dir(&self) -> &str {
        &self.private_dir
    }

    /// What the processes in the namespace have done; `None` if that cannot be read.
    #[must_use]
    pub fn activity(&self) -> Option<Activity> {
        Activity::read(format!("/proc/{}/root/proc", self.init_pid()))
    }

    /// Events that the init reports.
    #[must_use]
    pub fn events(&self) -> &Receiver<InitEvent> {
        &self.events
    }

    fn answer(&self) -> Result<Answer, NamespaceError> {
        let requests = self.requests.lock();
        requests.1.recv().map_err(|_| NamespaceError::Ended)
    }

    fn request(&self, request: &Request, fds: &[BorrowedFd]) -> Result<Answer, NamespaceError> {
        let requests = self.requests.lock();
        send(&requests.0, request, fds).map_err(|_| NamespaceError::Ended)?;
        match requests.1.recv() {
            Ok((Reply::Failed { message }, _)) => Err(NamespaceError::Refused(message)),
            Ok(answer) => Ok(answer),
            Err(_) => Err(NamespaceError::Ended),
        }
    }

    /// The job sees these names of machines. Only in a namespace for [`Network::Job`], and before the job.
    ///
    /// # Errors
    /// When `/etc/hosts` cannot be replaced: there is none.
    pub fn set_names(&self, names: Names) -> Result<(), NamespaceError> {
        self.request(&Request::SetNames(names), &[]).map(drop)
    }

    /// Starts the command. Returns the PIDs of the tree's root and of the command in the namespace.
    ///
    /// # Errors
    /// [`StartError::Command`] when it cannot be executed.
    pub fn start_job(
        &self,
        argv: &[OsString],
        variables: Vec<(String, OsString)>,
        terminal: Option<String>,
        stdio: [StdioSource; 3],
        fds: &[BorrowedFd],
    ) -> Result<(i32, i32), StartError> {
        let argv = argv.iter().cloned().map(OsStringExt::into_vec).collect();
        let variables = variables.into_iter().map(|(name, value)| (name, value.into_vec())).collect();
        match self.request(&Request::StartJob { argv, variables, terminal, stdio }, fds)? {
            (Reply::Started { root_pid, command_pid }, _) => Ok((root_pid, command_pid)),
            (Reply::NotStarted { errno }, _) => Err(StartError::Command(io::Error::from_raw_os_error(errno))),
            (other, _) => Err(unexpected(other).into()),
        }
    }

    /// Starts `criu swrk` in the namespace, with this library in it.
    ///
    /// # Errors
    /// When it cannot be executed.
    pub fn start_criu(
        &self,
        argv: &[OsString],
        terminal: Option<String>,
        fds: &[BorrowedFd],
        library: Option<BorrowedFd>,
    ) -> Result<CriuProcess, NamespaceError> {
        let argv = argv.iter().cloned().map(OsStringExt::into_vec).collect();
        let with_library = library.is_some();
        let fds: Vec<_> = fds.iter().copied().chain(library).collect();
        match self.request(&Request::Criu { argv, terminal, with_library }, &fds)? {
            (Reply::CriuStarted { pid, fds }, mut sockets) => {
                let socket = sockets.pop().ok_or_else(|| {
                    NamespaceError::Refused("the init did not send the socket of CRIU".into())
                })?;
                Ok(CriuProcess { pid, socket, fds })
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// Prepares the namespace for restoring the job with this command.
    ///
    /// # Errors
    /// When the reaper's program cannot be written.
    pub fn restore_reaper_program(&self, command_pid: i32) -> Result<(), NamespaceError> {
        self.request(&Request::RestoreReaperProgram { command_pid }, &[]).map(drop)
    }

    /// Makes the root of a tree that is being restored a subreaper, so that it adopts orphans.
    ///
    /// # Errors
    /// When the process cannot be traced.
    pub fn make_subreaper(&self, root_pid: i32) -> Result<(), NamespaceError> {
        self.request(&Request::MakeSubreaper { root_pid }, &[]).map(drop)
    }

    /// Reports the end of `root_pid` as an [`InitEvent`].
    ///
    /// # Errors
    /// When the init has ended.
    pub fn adopt(&self, root_pid: i32) -> Result<(), NamespaceError> {
        self.request(&Request::Adopt { root_pid }, &[]).map(drop)
    }

    /// Sends a signal to a process in the namespace, or to a process group; -1 means all processes but the init.
    ///
    /// # Errors
    /// When there is no such process, or the init has ended.
    pub fn signal(&self, pid: i32, group: bool, signal: i32) -> Result<(), NamespaceError> {
        self.request(&Request::Signal { pid, group, signal }, &[]).map(drop)
    }

    /// Watches the files that the job's processes write, except those below `excluded`. Returns the file systems that
    /// cannot be watched, with the reason.
    ///
    /// # Errors
    /// When the rights for it are missing (CAP_SYS_ADMIN outside of user namespaces), or the init has ended.
    pub fn track_files(
        &self,
        cwd: &Path,
        excluded: &[PathBuf],
    ) -> Result<Vec<(String, String)>, NamespaceError> {
        let cwd = cwd.as_os_str().as_bytes().to_vec();
        let excluded = excluded.iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
        match self.request(&Request::TrackFiles { cwd, excluded }, &[])? {
            (Reply::Tracking { unwatched }, _) => Ok(unwatched),
            (other, _) => Err(unexpected(other)),
        }
    }

    /// The absolute paths of files that the job has written since the last call with a journal, or since tracking began;
    /// `None` if some are missing. Those that follow are appended to `journal`, with its key, see [`super::written_files::read_journal`].
    ///
    /// # Errors
    /// When the init has ended.
    pub fn written_files(
        &self,
        journal: Option<(&File, FileKey)>,
    ) -> Result<Option<Vec<String>>, NamespaceError> {
        let fds: Vec<_> = journal.iter().map(|(journal, _)| journal.as_fd()).collect();
        match self.request(&Request::WrittenFiles { key: journal.and_then(|(_, key)| key) }, &fds)? {
            (Reply::Written { paths, is_complete }, _) => Ok(is_complete.then_some(paths)),
            (other, _) => Err(unexpected(other)),
        }
    }

    /// Surveys the job's processes and threads.
    ///
    /// # Errors
    /// When the init has ended.
    pub fn survey(&self) -> Result<Survey, NamespaceError> {
        match self.request(&Request::Survey, &[])? {
            (Reply::Surveyed { affinity, last_pid, memory_bytes, pids, processes, strays, lost_ipc }, _) => {
                Ok(Survey { affinity, last_pid, memory_bytes, pids, processes, strays, lost_ipc })
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// How many bytes wait in the queues of these sockets (process and descriptor), as FIONREAD says; `None` for those
    /// that cannot be asked.
    ///
    /// # Errors
    /// When the init has ended.
    pub fn queued_bytes(&self, sockets: Vec<(i32, i32)>) -> Result<Vec<Option<u64>>, NamespaceError> {
        match self.request(&Request::QueuedBytes { sockets }, &[])? {
            (Reply::QueuedBytes { bytes }, _) => Ok(bytes),
            (other, _) => Err(unexpected(other)),
        }
    }

    /// What the job has in its descriptors that CRIU does not save. The job must be frozen. The options of sockets are read
    /// for `limit` at most.
    ///
    /// # Errors
    /// When a socket cannot be asked, or the init has ended.
    pub fn descriptor_state(&self, limit: Duration) -> Result<DescriptorState, NamespaceError> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        match self.request(&Request::Descriptors { limit_ms }, &[])? {
            (Reply::Descriptors { queues, socket_options, unread_sockets, event_counters }, _) => {
                Ok(DescriptorState { queues, socket_options, unread_sockets, event_counters })
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// Restores what CRIU does not: CPU affinity, the last PID, what is in descriptors. Returns warnings for what could not
    /// be restored.
    ///
    /// # Errors
    /// When the init has ended.
    pub fn apply(&self, tree: &ProcessTree) -> Result<Vec<String>, NamespaceError> {
        match self.request(&Request::Apply { tree: tree.clone() }, &[])? {
            (Reply::Done { warnings }, _) => Ok(warnings),
            (other, _) => Err(unexpected(other)),
        }
    }
}

fn unexpected(reply: Reply) -> NamespaceError {
    match reply {
        Reply::Failed { message } => NamespaceError::Refused(message),
        other => NamespaceError::Refused(format!("the job's init answered {other:?}")),
    }
}

fn read_replies(socket: &UnixStream, answers: &Sender<Answer>, events: &Sender<InitEvent>) {
    // The receiver may have been dropped.
    let report = |event| {
        let _ = events.send(event);
    };
    loop {
        match receive::<Reply>(socket) {
            Ok(Some((Reply::Exited { pid, code }, _))) => report(InitEvent::Exited { pid, code }),
            Ok(Some(answer)) => {
                if answers.send(answer).is_err() {
                    return;
                }
            }
            Ok(None) => return report(InitEvent::Ended),
            Err(error) => {
                tracing::warn!("cannot read from the job's init: {error}");
                return report(InitEvent::Ended);
            }
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The init ends the job, records what it has written, and exits.
        let _ = self.requests.lock().0.shutdown(Shutdown::Both);
        ending::end(Arc::clone(&self.spawned));
    }
}
