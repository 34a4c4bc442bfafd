//! The launcher's side of the init.

use super::ending;
use super::messages::{Network, Reply, Request, StdioSource, receive, send};
use super::spawn::{self, Spawned};
use crate::sys::descriptor_limit;
use crate::sys::privileges::Privileges;
use ckpt_snapshot::AffinityGroup;
use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// News from the init that nobody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitEvent {
    /// The job's root, or a CRIU, ended.
    Exited {
        /// Its PID in the namespace.
        pid: i32,
        /// Its exit code, 128 + n for signal n.
        code: i32,
    },
    /// The init is gone, and everything in the namespace with it.
    Ended,
}

/// The namespace cannot be made, or does not answer.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The kernel refuses the namespaces.
    #[error(
        "cannot make a PID namespace for the job: {0}. ckpt-run needs root, or CAP_SYS_ADMIN: give it that; `ckpt-run doctor` says what else"
    )]
    Create(io::Error),
    /// Rights are missing.
    #[error(
        "cannot make a PID namespace for the job and save it: user ID {uid} lacks {missing}. Give ckpt-run these capabilities, or run it as root; `ckpt-run doctor` says more"
    )]
    Rights {
        /// Who.
        uid: u32,
        /// Names and purposes.
        missing: String,
    },
    /// There are no rights, and the way without them is closed.
    #[error(
        "cannot make a PID namespace for the job: user ID {uid} has no CAP_SYS_ADMIN, and may not make a user namespace either: {reason}. Run ckpt-run as root, or give it the capabilities that `ckpt-run doctor` names, or let the system allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    )]
    NoUserNamespace {
        /// Who.
        uid: u32,
        /// What the system says.
        reason: String,
    },
    /// A request failed inside.
    #[error("{0}")]
    Refused(String),
    /// The init died.
    #[error("the job's namespace has ended")]
    Ended,
}

/// The job could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The command cannot be executed.
    #[error("cannot run the command: {0}")]
    Command(io::Error),
    /// The rest.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
}

/// A running `criu swrk`.
pub struct CriuProcess {
    /// Its PID in the namespace.
    pub pid: i32,
    /// Its request socket.
    pub socket: OwnedFd,
    /// The numbers that the descriptors sent along have in CRIU and in the init; the terminal's comes last.
    pub fds: Vec<i32>,
}

/// What the processes of a job look like at one moment.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Threads by the CPUs they may run on.
    pub affinity: Vec<AffinityGroup>,
    /// The last PID given out.
    pub last_pid: i32,
    /// Memory that a dump would hold, bytes.
    pub resident_bytes: u64,
    /// PIDs of the processes.
    pub pids: Vec<i32>,
    /// Of these, the ones that are not below the job's root: a dump would not have them.
    pub strays: Vec<i32>,
    /// SysV shared memory, semaphores and message queues that a dump would not have.
    pub lost_ipc: usize,
}

type Answer = (Reply, Vec<OwnedFd>);

/// The job's namespaces. Dropping it ends everything in them, or says what does not end (see [`super::is_ending`]).
pub struct Namespace {
    spawned: Arc<Spawned>,
    /// One request at a time.
    requests: Mutex<(UnixStream, Receiver<Answer>)>,
    events: Receiver<InitEvent>,
}

impl Namespace {
    /// Makes the namespaces and their init. Call it on a thread that lives as long as the job: the init ends with it.
    ///
    /// # Errors
    /// [`NamespaceError::Rights`] and [`NamespaceError::NoUserNamespace`] when rights are missing,
    /// [`NamespaceError::Create`] when the kernel refuses all the same, [`NamespaceError::Refused`] when the set-up
    /// fails.
    pub fn create(network: Network) -> Result<Self, NamespaceError> {
        let rights = Privileges::detect();
        let uid = rustix::process::getuid().as_raw();
        let missing: Vec<_> =
            rights.missing().iter().map(|one| format!("{} ({})", one.name, one.why)).collect();
        if !missing.is_empty() {
            return Err(NamespaceError::Rights { uid, missing: missing.join(", ") });
        }
        Self::try_create(network).map_err(|error| {
            let reason = match error {
                error if !rights.wants_user_namespace() => return error,
                NamespaceError::Create(error) => error.to_string(),
                error => error.to_string(),
            };
            NamespaceError::NoUserNamespace { uid, reason }
        })
    }

    fn try_create(network: Network) -> Result<Self, NamespaceError> {
        let (ours, theirs) = UnixStream::pair().map_err(NamespaceError::Create)?;
        let spawned = spawn::spawn_init(&theirs, network).map_err(NamespaceError::Create)?;
        drop(theirs);
        descriptor_limit::restore_in(spawned.pid).map_err(|error| NamespaceError::Create(error.into()))?;
        let reader = ours.try_clone().map_err(NamespaceError::Create)?;
        let (answers, replies) = crossbeam_channel::unbounded();
        let (event_sender, events) = crossbeam_channel::unbounded();
        std::thread::Builder::new()
            .name("init-reader".to_owned())
            .spawn(move || read_replies(&reader, &answers, &event_sender))
            .map_err(NamespaceError::Create)?;
        let namespace = Self { spawned: Arc::new(spawned), requests: Mutex::new((ours, replies)), events };
        match namespace.answer()? {
            (Reply::Ready, _) => Ok(namespace),
            (other, _) => Err(unexpected(other)),
        }
    }

    /// The init's PID as this process sees it: `/proc/PID/root` is the job's view of the file system.
    #[must_use]
    pub fn init_pid(&self) -> i32 {
        self.spawned.pid.as_raw_nonzero().get()
    }

    /// What the init tells unasked.
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

    /// Starts the command; returns (PID of the tree's root, PID of the command), as seen inside.
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

    /// Starts `criu swrk` inside.
    ///
    /// # Errors
    /// When it cannot be executed.
    pub fn start_criu(
        &self,
        argv: &[OsString],
        terminal: Option<String>,
        fds: &[BorrowedFd],
    ) -> Result<CriuProcess, NamespaceError> {
        let argv = argv.iter().cloned().map(OsStringExt::into_vec).collect();
        match self.request(&Request::Criu { argv, terminal }, fds)? {
            (Reply::CriuStarted { pid, fds }, mut sockets) => {
                let socket = sockets
                    .pop()
                    .ok_or_else(|| NamespaceError::Refused("CRIU came without its socket".into()))?;
                Ok(CriuProcess { pid, socket, fds })
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// Prepares the namespace for a restore of the job with this command.
    ///
    /// # Errors
    /// When the program of its root cannot be written.
    pub fn put_back_reaper(&self, command_pid: i32) -> Result<(), NamespaceError> {
        self.request(&Request::PutBackReaper { command_pid }, &[]).map(drop)
    }

    /// Lets the root of a tree that is being restored adopt orphans from now on.
    ///
    /// # Errors
    /// When it cannot be stopped for that.
    pub fn make_subreaper(&self, root_pid: i32) -> Result<(), NamespaceError> {
        self.request(&Request::MakeSubreaper { root_pid }, &[]).map(drop)
    }

    /// Makes the end of `root_pid` an [`InitEvent`].
    ///
    /// # Errors
    /// When the init is gone.
    pub fn adopt(&self, root_pid: i32) -> Result<(), NamespaceError> {
        self.request(&Request::Adopt { root_pid }, &[]).map(drop)
    }

    /// Sends a signal to a process inside, or to a process group; -1 is everything but the init.
    ///
    /// # Errors
    /// When there is no such process, or the init is gone.
    pub fn signal(&self, pid: i32, group: bool, signal: i32) -> Result<(), NamespaceError> {
        self.request(&Request::Signal { pid, group, signal }, &[]).map(drop)
    }

    /// Looks at the job's threads.
    ///
    /// # Errors
    /// When the init is gone.
    pub fn survey(&self) -> Result<Survey, NamespaceError> {
        match self.request(&Request::Survey, &[])? {
            (Reply::Surveyed { affinity, last_pid, resident_bytes, pids, strays, lost_ipc }, _) => {
                Ok(Survey { affinity, last_pid, resident_bytes, pids, strays, lost_ipc })
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// Puts back what CRIU does not; returns what could not be put back.
    ///
    /// # Errors
    /// When the init is gone.
    pub fn apply(&self, affinity: &[AffinityGroup], last_pid: i32) -> Result<Vec<String>, NamespaceError> {
        match self.request(&Request::Apply { affinity: affinity.to_vec(), last_pid }, &[])? {
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
    // Nobody may listen any more: then nobody needs to know.
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
                tracing::warn!("the job's init cannot be heard: {error}");
                return report(InitEvent::Ended);
            }
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ending::end(Arc::clone(&self.spawned));
    }
}
