//! The running launcher's control socket: other `ckpt-run` commands ask it for checkpoints and its status.

use crate::runtime_dir;
use crate::status::SharedStatus;
use ckpt_protocol::control::{CONTROL_VERSION, Call, Progress, Reply, Request};
use ckpt_protocol::frame;
use ckpt_snapshot::JobDir;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use rustix::process::getuid;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How often a waiting command hears how far its checkpoint is.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);
/// A peer that sends nothing for so long is let go.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A checkpoint that somebody waits for: the answer goes here.
pub type Answer = Sender<Reply>;

/// The socket; removed when dropped.
pub struct ControlServer {
    path: PathBuf,
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
    /// Listens for the job; `on_checkpoint` is called for every checkpoint that is asked for. The job's lock has to
    /// be held: a socket that is there already is a dead launcher's.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn listen(
        job: &JobDir,
        status: &Arc<SharedStatus>,
        on_checkpoint: impl Fn(Answer) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let path = socket_path(job)?;
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        set_private(&path)?;
        let status = Arc::clone(status);
        let on_checkpoint = Arc::new(on_checkpoint);
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let (status, on_checkpoint) = (Arc::clone(&status), Arc::clone(&on_checkpoint));
                // A thread per caller: there are few, and one that waits must not keep the others waiting.
                let served = std::thread::Builder::new()
                    .name("control-call".to_owned())
                    .spawn(move || serve(stream, &status, &*on_checkpoint));
                if let Err(error) = served {
                    tracing::warn!("a call cannot be answered: {error}");
                }
            }
        })?;
        Ok(Self { path })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn set_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
}

fn serve(mut stream: UnixStream, status: &SharedStatus, on_checkpoint: &dyn Fn(Answer)) {
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
    let reply = match outcome {
        Err(reason) => Reply::Error(reason),
        Ok(Request::Status) => Reply::Status(Box::new(status.snapshot())),
        Ok(Request::Checkpoint) => match checkpoint(&mut stream, status, on_checkpoint) {
            Some(reply) => reply,
            None => return,
        },
    };
    // The caller may be gone: its checkpoint was taken all the same.
    let _ = frame::write(&mut stream, &reply);
}

/// Asks for a checkpoint and tells the caller how far it is; `None` when the caller is gone.
fn checkpoint(
    stream: &mut UnixStream,
    status: &SharedStatus,
    on_checkpoint: &dyn Fn(Answer),
) -> Option<Reply> {
    let (answer, answered) = bounded(1);
    on_checkpoint(answer);
    let mut told = Progress::default();
    loop {
        match answered.recv_timeout(PROGRESS_EVERY) {
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

fn peer_is_allowed(stream: &UnixStream) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|error| error.to_string())?;
    if peer.uid == getuid() || peer.uid.is_root() {
        Ok(())
    } else {
        Err("this job belongs to another user".to_owned())
    }
}
