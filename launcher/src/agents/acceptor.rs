//! The socket on which agents are met, and the end of listening on it.

use crate::sys::deadline::ACCEPT_RETRY_INTERVAL;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use tracing::warn;

use super::STACK_BYTES;
/// The listening socket and the thread that accepts on it.
pub struct Acceptor {
    listener: Arc<UnixListener>,
    is_stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Listens at `path`; hands each connection to `take_up`.
    ///
    /// # Errors
    /// What the system says to making the socket, and `AlreadyExists` if something else than a socket is there.
    pub fn start(
        path: &Path,
        take_up: impl Fn(UnixStream) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let listener = Arc::new(bind(path)?);
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (theirs, stop) = (Arc::clone(&listener), Arc::clone(&is_stopping));
        let thread = thread::Builder::new().name("agents".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || accept(&take_up, &theirs, &stop))?;
        Ok(Self { listener, is_stopping, thread })
    }

    /// Returns when no new connection can come, and all that came have been handed on.
    pub fn stop(self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            warn!(%error, "the agents' socket cannot be shut down");
        }
        if self.thread.join().is_err() {
            warn!("the thread that accepts agents had failed");
        }
    }
}

/// Accepts until the listener is shut down and everything from before that is accepted.
fn accept(
    take_up: &impl Fn(UnixStream) -> io::Result<()>,
    listener: &UnixListener,
    is_stopping: &AtomicBool,
) {
    loop {
        let taken = listener.accept().and_then(|(stream, _)| take_up(stream));
        match taken {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::InvalidInput && is_stopping.load(Ordering::SeqCst) => {
                return;
            }
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                warn!(%error, "an agent cannot be accepted");
                thread::sleep(ACCEPT_RETRY_INTERVAL);
            }
        }
    }
}

/// A listener at `path` that the launcher's user alone can connect to. It is there all at once, listening.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "there is something else than a socket"));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut new = OsString::from(path);
    new.push("~");
    let new = PathBuf::from(new);
    match fs::symlink_metadata(&new) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(&new)?,
        _ => {}
    }
    let listener = UnixListener::bind(&new)?;
    fs::set_permissions(&new, Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&new, path))
        .inspect_err(|_| drop(fs::remove_file(&new)))?;
    Ok(listener)
}
