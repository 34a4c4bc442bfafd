//! One dump or restore by `criu swrk`, controlled over its socket.

use super::rpc::{Options, Request, RequestType, Response};
use crate::namespace::{Activity, CriuProcess};
use crate::sys::deadline::{PRECOPY_POLL_INTERVAL, RESTORE_POLL_INTERVAL};
use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::time::{Duration, Instant};

/// Why a dump or restore failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// CRIU took too long. The process still runs.
    #[error("CRIU did not finish in time")]
    Timeout,
    /// Nothing has moved during a restore. The processes still exist.
    #[error(
        "nothing has moved for {} seconds: one of the processes was probably killed while it was restored", .0.as_secs()
    )]
    Stalled(Duration),
    /// Nobody wants the result any more. The process still runs.
    #[error("it is not wanted any more")]
    Withdrawn,
    /// CRIU ended without an answer.
    #[error("CRIU ended without an answer")]
    Died,
    /// CRIU reported a failure; its log has the reason.
    #[error("CRIU failed{}", .0.as_deref().map(|text| format!(": {text}")).unwrap_or_default())]
    Failed(Option<String>),
    /// The launcher's work at one of CRIU's stages failed, so CRIU was told to abort.
    #[error("{0}")]
    Stage(String),
    /// A resume would lack something, which it may not with the next try: a message between processes, a process.
    #[error("{0}")]
    Refused(String),
    /// The socket failed.
    #[error("cannot communicate with CRIU: {0}")]
    Io(#[from] io::Error),
}

/// CRIU's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// For a restore: the root of the tree.
    pub pid: Option<i32>,
}

/// When to give a restore up.
#[derive(Clone, Copy)]
pub struct RestoreLimits<'a> {
    /// Time between two messages of CRIU; the launcher's work at CRIU's stages does not count.
    pub silence: Duration,
    /// Time in which nothing moves. CRIU waits for ever for a process that is killed while it is restored.
    pub stall: Duration,
    /// Reads what the processes in the namespace do.
    pub activity: &'a dyn Fn() -> Option<Activity>,
}

/// How long to wait for CRIU.
#[derive(Clone, Copy)]
enum TimeLimit<'a> {
    /// For the whole operation.
    Deadline(Instant),
    /// The same, unless nobody wants the result any more.
    While(Instant, &'a dyn Fn() -> bool),
    /// For CRIU's next message.
    Restore(RestoreLimits<'a>),
}

/// The session with one `criu swrk`.
pub struct Session {
    process: CriuProcess,
}

impl Session {
    /// A session with a running CRIU.
    #[must_use]
    pub fn new(process: CriuProcess) -> Self {
        Self { process }
    }

    /// The CRIU process.
    #[must_use]
    pub fn process(&self) -> &CriuProcess {
        &self.process
    }

    /// Dumps. `at_stage` is called at each of CRIU's stages (`pre-dump`, `post-dump`…); the job is frozen at `post-dump`.
    /// An error of `at_stage` makes CRIU abort, and the job continues.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn dump(
        &self,
        options: Options,
        deadline: Instant,
        at_stage: &mut dyn FnMut(&str) -> Result<(), String>,
    ) -> Result<Outcome, SessionError> {
        self.perform(RequestType::Dump, options, TimeLimit::Deadline(deadline), at_stage)
    }

    /// Copies the memory of a job that then continues at once: the pages are written after that. Ends early unless
    /// `is_wanted`.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn pre_dump(
        &self,
        options: Options,
        deadline: Instant,
        is_wanted: &dyn Fn() -> bool,
        at_stage: &mut dyn FnMut(&str) -> Result<(), String>,
    ) -> Result<Outcome, SessionError> {
        self.perform(RequestType::SinglePreDump, options, TimeLimit::While(deadline, is_wanted), at_stage)
    }

    /// Restores. An error of `at_stage` at `post-restore` ends the restored processes before they have run.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn restore(
        &self,
        options: Options,
        limits: RestoreLimits,
        at_stage: &mut dyn FnMut(&str) -> Result<(), String>,
    ) -> Result<Outcome, SessionError> {
        self.perform(RequestType::Restore, options, TimeLimit::Restore(limits), at_stage)
    }

    fn perform(
        &self,
        request_type: RequestType,
        options: Options,
        limit: TimeLimit<'_>,
        at_stage: &mut dyn FnMut(&str) -> Result<(), String>,
    ) -> Result<Outcome, SessionError> {
        let options = Options { notify_scripts: Some(true), ..options };
        self.send(&Request { kind: request_type as i32, opts: Some(options), notify_success: None })?;
        let mut refused = None;
        loop {
            let response = match self.receive(limit) {
                Err(SessionError::Died) if refused.is_some() => {
                    return Err(SessionError::Stage(refused.unwrap_or_default()));
                }
                other => other?,
            };
            if response.kind != RequestType::Notify as i32 {
                return match (response.success, refused) {
                    (true, _) => Ok(Outcome { pid: response.restore.map(|restored| restored.pid) }),
                    (false, Some(reason)) => Err(SessionError::Stage(reason)),
                    (false, None) => Err(SessionError::Failed(describe(&response))),
                };
            }
            let stage = response.notify.and_then(|notify| notify.script).unwrap_or_default();
            let result = at_stage(&stage);
            let notify_success = Some(result.is_ok());
            refused = result.err().or(refused);
            self.send(&Request { kind: RequestType::Notify as i32, opts: None, notify_success })?;
        }
    }

    fn send(&self, request: &Request) -> Result<(), SessionError> {
        let message = request.encode_to_vec();
        match retry_on_intr(|| send(&self.process.socket, &message, SendFlags::NOSIGNAL)) {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(SessionError::Died),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    fn is_readable_by(&self, deadline: Instant) -> Result<bool, SessionError> {
        let ready = retry_on_intr(|| {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
            poll(&mut [PollFd::new(&self.process.socket, PollFlags::IN)], left.as_ref())
        });
        Ok(ready.map_err(io::Error::from)? > 0)
    }

    fn wait_while_active(&self, limits: RestoreLimits) -> Result<(), SessionError> {
        let RestoreLimits { silence, stall, activity } = limits;
        let deadline = Instant::now() + silence;
        // Polls are counted, and not the time: a machine may be suspended.
        let (mut idle, mut seen) = (Duration::ZERO, activity());
        while !self.is_readable_by(deadline.min(Instant::now() + RESTORE_POLL_INTERVAL))? {
            if Instant::now() >= deadline {
                return Err(SessionError::Timeout);
            }
            let now = activity();
            let is_idle = !has_moved(seen.as_ref(), now.as_ref());
            idle = if is_idle { idle + RESTORE_POLL_INTERVAL } else { Duration::ZERO };
            if idle >= stall {
                return Err(SessionError::Stalled(idle));
            }
            seen = now;
        }
        Ok(())
    }

    fn receive(&self, limit: TimeLimit<'_>) -> Result<Response, SessionError> {
        match limit {
            TimeLimit::Deadline(deadline) => {
                if !self.is_readable_by(deadline)? {
                    return Err(SessionError::Timeout);
                }
            }
            TimeLimit::While(deadline, is_wanted) => {
                while !self.is_readable_by(deadline.min(Instant::now() + PRECOPY_POLL_INTERVAL))? {
                    if Instant::now() >= deadline {
                        return Err(SessionError::Timeout);
                    }
                    if !is_wanted() {
                        return Err(SessionError::Withdrawn);
                    }
                }
            }
            TimeLimit::Restore(limits) => self.wait_while_active(limits)?,
        }
        // A message is one datagram: peek at its size first, then receive it.
        let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
        let peeked = retry_on_intr(|| recv(&self.process.socket, &mut [0_u8; 0][..], flags));
        let bytes = match peeked {
            Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET) => return Err(SessionError::Died),
            Ok((_, bytes)) => bytes,
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let mut buffer = vec![0; bytes];
        retry_on_intr(|| recv(&self.process.socket, &mut buffer[..], RecvFlags::empty()))
            .map_err(io::Error::from)?;
        Response::decode(&buffer[..]).map_err(|error| io::Error::other(error).into())
    }
}

/// Whether somebody has moved between two polls, or waits for a disk.
fn has_moved(before: Option<&Activity>, now: Option<&Activity>) -> bool {
    before != now || now.is_none_or(|now| now.is_busy)
}

fn describe(response: &Response) -> Option<String> {
    let errno = response.cr_errno.filter(|&errno| errno != 0);
    let errno = errno.map(|errno| io::Error::from_raw_os_error(errno).to_string());
    let text = response.cr_errmsg.as_ref().filter(|text| !text.is_empty());
    text.map(|text| String::from_utf8_lossy(text).into_owned()).or(errno)
}
