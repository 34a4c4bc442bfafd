//! The running launcher's control socket: other `ckpt-run` commands ask it for checkpoints and its status.

use crate::job::status::SharedStatus;
use crate::sys::deadline::{ACCEPT_RETRY_INTERVAL, CALL_TIMEOUT, LAST_ANSWERS_TIMEOUT, PROGRESS_INTERVAL};
use crate::sys::runtime_dir;
use ckpt_protocol::control::{CONTROL_VERSION, Call, Progress, Reply, Request};
use ckpt_protocol::frame;
use ckpt_snapshot::JobDir;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use rustix::process::getuid;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
/// A checkpoint that somebody waits for: the answer goes here.
pub type Answer = Sender<Reply>;

/// What a caller wants of the supervisor.
pub enum Demand {
    /// A snapshot.
    Checkpoint,
    /// The end, with a snapshot.
    Stop,
}

/// The socket; removed when dropped.
pub struct ControlServer {
    path: PathBuf,
    /// Held by everyone who still has to answer.
    calls: Arc<()>,
}

/// Where the control socket of a job is: it depends on the store and the job only, so that other commands find it.
/// It is not in the store, which may be on a file system without sockets, or too deep for a socket's path.
///
/// # Errors
/// When there is no private directory for it.
pub fn socket_path(job: &JobDir) -> io::Result<PathBuf> {
    Ok(runtime_dir::runtime_dir()?.join(format!("{}.sock", runtime_dir::short_name(job.path()))))
}

impl ControlServer {
    /// Listens for the job; `on_demand` is called for everything that is asked of the supervisor. The job's lock has to
    /// be held: a socket that is there already is a dead launcher's.
    ///
    /// # Errors
    /// When the socket cannot be made.
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
        set_private(&path)?;
        let status = Arc::clone(status);
        let on_demand = Arc::new(on_demand);
        let calls = Arc::new(());
        let call = Arc::clone(&calls);
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            loop {
                let stream = next_caller(|| listener.accept().map(|(stream, _)| stream));
                let (status, on_demand, call) =
                    (Arc::clone(&status), Arc::clone(&on_demand), Arc::clone(&call));
                // A thread per caller: there are few, and one that waits must not keep the others waiting.
                let served = std::thread::Builder::new().name("control-call".to_owned()).spawn(move || {
                    serve(stream, &status, &*on_demand);
                    drop(call);
                });
                if let Err(error) = served {
                    tracing::warn!("a call cannot be answered: {error}");
                }
            }
        })?;
        Ok(Self { path, calls })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // Whoever was answered is to hear it: the process ends soon. The thread that accepts holds the second.
        let deadline = Instant::now() + LAST_ANSWERS_TIMEOUT;
        while Arc::strong_count(&self.calls) > 2 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The next caller. A shortage of descriptors is waited out: it would be found again at once.
fn next_caller(mut accept: impl FnMut() -> io::Result<UnixStream>) -> UnixStream {
    let mut told = false;
    loop {
        match accept() {
            Ok(stream) => return stream,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                if !told {
                    tracing::warn!("other ckpt-run commands cannot reach this job at the moment: {error}");
                    told = true;
                }
                std::thread::sleep(ACCEPT_RETRY_INTERVAL);
            }
        }
    }
}

fn set_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
}

fn serve(mut stream: UnixStream, status: &SharedStatus, on_demand: &dyn Fn(Demand, Answer)) {
    let outcome = peer_is_allowed(&stream).and_then(|()| {
        stream.set_read_timeout(Some(CALL_TIMEOUT)).map_err(|error| error.to_string())?;
        let call: Call = frame::read(&mut stream).map_err(|error| error.to_string())?;
        if call.version != CONTROL_VERSION {
            return Err(format!(
                "this launcher speaks version {CONTROL_VERSION}, the command version {}",
                call.version
            ));
        }
        Ok(call.request)
    });
    let mut demand = |what| {
        let (answer, answered) = bounded(1);
        on_demand(what, answer);
        await_answer(&mut stream, status, &answered)
    };
    let reply = match outcome {
        Err(reason) => Some(Reply::Error(reason)),
        Ok(Request::Status) => Some(Reply::Status(Box::new(status.snapshot()))),
        Ok(Request::Checkpoint) => demand(Demand::Checkpoint),
        Ok(Request::Stop) => demand(Demand::Stop),
    };
    let Some(reply) = reply else { return };
    // The caller may be gone: its checkpoint was taken all the same.
    let _ = frame::write(&mut stream, &reply);
}

/// Waits for the answer and tells the caller how far it is; `None` when the caller is gone.
fn await_answer(stream: &mut UnixStream, status: &SharedStatus, answered: &Receiver<Reply>) -> Option<Reply> {
    let mut told = Progress::default();
    loop {
        match answered.recv_timeout(PROGRESS_INTERVAL) {
            Ok(reply) => return Some(reply),
            Err(RecvTimeoutError::Disconnected) => return Some(Reply::Error("the job has ended".to_owned())),
            Err(RecvTimeoutError::Timeout) => {
                let now = status.progress();
                if now != told {
                    frame::write(stream, &Reply::Progress(now)).ok()?;
                    told = now;
                }
            }
        }
    }
}

/// The job's user and root only. The socket's mode says so too; this holds where somebody has changed that.
fn peer_is_allowed(stream: &UnixStream) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|error| error.to_string())?;
    if peer.uid == getuid() || peer.uid.is_root() {
        Ok(())
    } else {
        Err("this job belongs to another user".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Uid;

    /// A caller of that user; the kernel notes which thread connects, not who owns the process.
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
        assert!(begun.elapsed() >= 3 * ACCEPT_RETRY_INTERVAL, "it has been asked for again and again");
    }

    #[test]
    fn strangers_are_refused_even_where_the_socket_is_open_to_all() {
        use std::os::unix::fs::PermissionsExt;
        if !getuid().is_root() {
            eprintln!("skipped: only root can be somebody else");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        for path in [dir.path(), &path] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let own = caller(&listener, &path, getuid());
        assert_eq!(peer_is_allowed(&own), Ok(()));
        let stranger = caller(&listener, &path, Uid::from_raw(65534));
        let refused = peer_is_allowed(&stranger).unwrap_err();
        assert!(refused.contains("another user"), "{refused}");
    }
}
