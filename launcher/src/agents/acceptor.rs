//! The listening socket for agents.

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
    /// Listens at `path`; passes each connection to `on_connection`.
    ///
    /// # Errors
    /// When the socket cannot be created, and `AlreadyExists` if the path exists and is not a socket.
    pub fn start(
        path: &Path,
        on_connection: impl Fn(UnixStream) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let listener = Arc::new(bind(path)?);
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (theirs, stop) = (Arc::clone(&listener), Arc::clone(&is_stopping));
        let thread = thread::Builder::new().name("agents".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || accept(&on_connection, &theirs, &stop))?;
        Ok(Self { listener, is_stopping, thread })
    }

    /// Returns when no new connection can be made, and all existing ones were passed on.
    pub fn stop(self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            warn!(%error, "the agents' socket cannot be shut down");
        }
        if self.thread.join().is_err() {
            warn!("the thread that accepts agents panicked");
        }
    }
}

/// Accepts until the listener is shut down and all earlier connections are accepted.
fn accept(
    on_connection: &impl Fn(UnixStream) -> io::Result<()>,
    listener: &UnixListener,
    is_stopping: &AtomicBool,
) {
    loop {
        let accepted = listener.accept().and_then(|(stream, _)| on_connection(stream));
        match accepted {
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

/// A listener at `path` that only the launcher's user can connect to. It appears at `path` when it already listens.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "the path exists and is not a socket"));
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
