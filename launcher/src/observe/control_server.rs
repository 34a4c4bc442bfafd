//! The control socket of a running launcher, on which other `ckpt-run` commands request checkpoints and the status.

use crate::job::status::SharedStatus;
use crate::sys::deadline::{ACCEPT_RETRY_INTERVAL, CALL_TIMEOUT, LAST_ANSWERS_TIMEOUT, PROGRESS_INTERVAL};
use crate::sys::peer::credentials;
use crate::sys::runtime_dir;
use ckpt_protocol::control::{CONTROL_VERSION, Call, Progress, Reply, Request};
use ckpt_protocol::frame;
use ckpt_snapshot::JobDir;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use rustix::process::getuid;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where the reply to a waiting caller is sent.
pub type Answer = Sender<Reply>;

/// A request of a caller to the supervisor.
pub enum Demand {
    /// A snapshot.
    Checkpoint,
    /// A final snapshot and the end of the job; by force also without the snapshot.
    Stop {
        /// Whether by force.
        force: bool,
    },
    /// The space of deleted snapshots.
    Reclaim,
}

/// The socket; removed when dropped.
pub struct ControlServer {
    path: PathBuf,
    /// Held by each thread that still has to reply.
    calls: Arc<()>,
}

/// The path of a job's control socket. It depends only on the store and the job, so that other commands find the socket.
/// The socket is not in the store, which may be on a file system without sockets, or too deep for the path of a socket.
///
/// # Errors
/// When there is no private directory for it.
pub fn socket_path(job: &JobDir) -> io::Result<PathBuf> {
    runtime_dir::find(&format!("{}.sock", runtime_dir::short_name(job.path())))
}

/// The control sockets of all running launchers of this user on this machine, and of some that were killed.
#[must_use]
pub fn all_sockets() -> Vec<PathBuf> {
    runtime_dir::all_with_end(".sock")
}

impl ControlServer {
    /// Listens for the job; `on_demand` is called for each request to the supervisor. The caller must hold the job's lock:
    /// an existing socket is then the leftover of a dead launcher.
    ///
    /// # Errors
    /// When the socket cannot be created.
    pub fn listen(
        job: &JobDir,
        status: &Arc<SharedStatus>,
        on_demand: impl Fn(Demand, Answer) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let path = socket_path(job)?;
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let status = Arc::clone(status);
        let on_demand = Arc::new(on_demand);
        let calls = Arc::new(());
        let call = Arc::clone(&calls);
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            loop {
                let stream = next_caller(|| listener.accept().map(|(stream, _)| stream));
                let (status, on_demand, call) =
                    (Arc::clone(&status), Arc::clone(&on_demand), Arc::clone(&call));
                // A thread per caller: there are few, and a waiting caller must not block the others.
                let served = std::thread::Builder::new().name("control-call".to_owned()).spawn(move || {
                    serve(stream, &status, &*on_demand);
                    drop(call);
                });
                if let Err(error) = served {
                    tracing::warn!("cannot start a thread for a call: {error}");
                }
            }
        })?;
        Ok(Self { path, calls })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // Replies under way must be sent before the process exits. The accepting thread holds the second reference.
        let deadline = Instant::now() + LAST_ANSWERS_TIMEOUT;
        while Arc::strong_count(&self.calls) > 2 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The next caller. On a shortage of descriptors, waits before the next try.
fn next_caller(mut accept: impl FnMut() -> io::Result<UnixStream>) -> UnixStream {
    let mut is_reported = false;
    loop {
        match accept() {
            Ok(stream) => return stream,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                if !is_reported {
                    tracing::warn!("other ckpt-run commands cannot reach this job for now: {error}");
                    is_reported = true;
                }
                std::thread::sleep(ACCEPT_RETRY_INTERVAL);
            }
        }
    }
}

fn serve(mut stream: UnixStream, status: &SharedStatus, on_demand: &dyn Fn(Demand, Answer)) {
    let outcome = peer_is_allowed(&stream).and_then(|()| {
        stream.set_read_timeout(Some(CALL_TIMEOUT)).map_err(|error| error.to_string())?;
        let call: Call = frame::read(&mut stream).map_err(|error| error.to_string())?;
        if call.version != CONTROL_VERSION {
            return Err(format!(
                "the launcher has control version {CONTROL_VERSION}, the command has {}: use the same version of ckpt-run for both",
                call.version
            ));
        }
        Ok(call.request)
    });
    let mut forward = |demand| {
        let (answer, answered) = bounded(1);
        on_demand(demand, answer);
        await_answer(&mut stream, status, &answered)
    };
    let reply = match outcome {
        Err(reason) => Some(Reply::Error(reason)),
        Ok(Request::Status) => Some(Reply::Status(Box::new(status.snapshot()))),
        Ok(Request::Output) => Some(Reply::Output(status.output())),
        Ok(Request::Checkpoint) => forward(Demand::Checkpoint),
        Ok(Request::Stop) => forward(Demand::Stop { force: false }),
        Ok(Request::ForceStop) => forward(Demand::Stop { force: true }),
        Ok(Request::Reclaim) => forward(Demand::Reclaim),
    };
    let Some(reply) = reply else { return };
    // The caller may have disconnected; its checkpoint was taken regardless.
    let _ = frame::write(&mut stream, &reply);
}

/// Waits for the reply and sends progress to the caller; `None` when the caller has disconnected.
fn await_answer(stream: &mut UnixStream, status: &SharedStatus, answered: &Receiver<Reply>) -> Option<Reply> {
    let mut reported = Progress::default();
    loop {
        match answered.recv_timeout(PROGRESS_INTERVAL) {
            Ok(reply) => return Some(reply),
            Err(RecvTimeoutError::Disconnected) => return Some(Reply::Error("the job has ended".to_owned())),
            Err(RecvTimeoutError::Timeout) => {
                let now = status.progress();
                if now != reported {
                    frame::write(stream, &Reply::Progress(now)).ok()?;
                    reported = now;
                }
            }
        }
    }
}

/// Only the user of the job and root are allowed. The mode of the socket says the same, but may have been changed.
fn peer_is_allowed(stream: &UnixStream) -> Result<(), String> {
    let uid = credentials(stream).map_err(|error| error.to_string())?.uid;
    if uid == getuid().as_raw() || uid == 0 {
        Ok(())
    } else {
        Err("this job belongs to another user".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Uid;
    use std::path::Path;

    /// A caller with that user ID; the kernel records the credentials of the connecting thread.
    fn caller(listener: &UnixListener, path: &Path, uid: Uid) -> UnixStream {
        let path = path.to_owned();
        let connect = move || {
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            UnixStream::connect(path).unwrap()
        };
        let theirs = std::thread::spawn(connect).join().unwrap();
        let (ours, _) = listener.accept().unwrap();
        drop(theirs);
        ours
    }

    #[test]
    fn a_shortage_is_waited_out() {
        let (stream, _theirs) = UnixStream::pair().unwrap();
        let mut stream = Some(stream);
        let mut shortages = 3;
        let begun = Instant::now();
        next_caller(|| {
            if shortages > 0 {
                shortages -= 1;
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            Ok(stream.take().unwrap())
        });
        assert!(begun.elapsed() >= 3 * ACCEPT_RETRY_INTERVAL, "accept was called without a pause");
    }

    #[test]
    fn strangers_are_refused_even_where_the_socket_is_open_to_all() {
        if !getuid().is_root() {
            eprintln!("skipped: only root can become another user");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        for path in [dir.path(), &path] {
            std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
        }
        let own = caller(&listener, &path, getuid());
        assert_eq!(peer_is_allowed(&own), Ok(()));
        let stranger = caller(&listener, &path, Uid::from_raw(65534));
        let refused = peer_is_allowed(&stranger).unwrap_err();
        assert!(refused.contains("another user"), "{refused}");
    }
}
