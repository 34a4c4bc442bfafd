//! The agent's connection to the launcher.
//!
//! The descriptor table belongs to the application, which may close or replace any descriptor at any time
//! (`closefrom`, `dup2` onto a fixed number). So the socket
//! - is moved up to [`HIGH_DESCRIPTOR`] or above, away from the numbers that programs and shells pick;
//! - is identified by its inode: each operation first checks that the number still means our socket, and closing leaves
//!   other files alone;
//! - is recorded in [`SLOT`], for a forked child and for the end of the main thread.

use std::ffi::c_int;
use std::io::{self, ErrorKind, Read, Write};
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use ckpt_protocol::descriptors;

/// Where the search for a free descriptor begins, as far as the process's limit allows.
const HIGH_DESCRIPTOR: c_int = 900;

/// The descriptor number in [`SLOT`] that stands for none.
const NONE: c_int = -1;

/// The one socket that the agent of this process has, if it has one.
static SLOT: Slot =
    Slot { descriptor: AtomicI32::new(NONE), device: AtomicU64::new(0), inode: AtomicU64::new(0) };

struct Slot {
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

/// Turns the C way of reporting errors into Rust's.
fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn counted(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The path of the launcher's socket.
pub struct Address(libc::sockaddr_un);

impl Address {
    /// `None` for a path that no unix socket can have.
    pub fn new(path: &[u8]) -> Option<Self> {
        // SAFETY: sockaddr_un is a plain C structure, for which all zeros is a valid value.
        let mut address: libc::sockaddr_un = unsafe { zeroed() };
        // The last byte stays zero: the path is a C string for `exists` too.
        if path.is_empty() || path.len() >= address.sun_path.len() || path.contains(&0) {
            return None;
        }
        address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).ok()?;
        for (to, &from) in address.sun_path.iter_mut().zip(path) {
            *to = from.cast_signed();
        }
        Some(Self(address))
    }

    /// Whether a socket is there, which takes no descriptor to find out.
    pub fn exists(&self) -> bool {
        let mut status = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the path is NUL-terminated (see `new`) and `status` has room for what stat writes.
        if unsafe { libc::stat(self.0.sun_path.as_ptr(), status.as_mut_ptr()) } != 0 {
            return false;
        }
        // SAFETY: stat succeeded, so it has written the whole structure.
        let status = unsafe { status.assume_init() };
        status.st_mode & libc::S_IFMT == libc::S_IFSOCK
    }
}

/// A unix stream socket; the agent's is recorded in [`SLOT`] for as long as it is open.
pub struct Socket {
    descriptor: c_int,
    device: u64,
    inode: u64,
    is_noted: bool,
}

impl Socket {
    /// Makes a socket that is not connected yet.
    ///
    /// To be called where no `fork` can be on its way: inside [`crate::fork::while_none`], or while the
    /// process has but one thread.
    pub fn open() -> io::Result<Self> {
        let mut socket = Self::brief()?;
        SLOT.device.store(socket.device, SeqCst);
        SLOT.inode.store(socket.inode, SeqCst);
        SLOT.descriptor.store(socket.descriptor, SeqCst);
        socket.is_noted = true;
        Ok(socket)
    }

    /// Makes one for a short conversation of any thread, which nobody looks for: to be called, and closed, inside
    /// [`crate::fork::while_none`].
    pub fn brief() -> io::Result<Self> {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket takes plain numbers and makes a new descriptor.
        let low = checked(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
        let descriptor = moved_up(low);
        let Some((device, inode)) = identity(descriptor) else {
            close(descriptor);
            return Err(ErrorKind::NotFound.into());
        };
        Ok(Self { descriptor, device, inode, is_noted: false })
    }

    /// The recorded socket. It must have no other owner: it was kept with [`Socket::keep`], or its
    /// owner was a thread of the parent that `fork` did not copy.
    pub fn noted() -> Option<Self> {
        let descriptor = SLOT.descriptor.load(SeqCst);
        let (device, inode) = (SLOT.device.load(SeqCst), SLOT.inode.load(SeqCst));
        (descriptor != NONE).then_some(Self { descriptor, device, inode, is_noted: true })
    }

    /// Leaves the socket open and recorded, for the thread that takes it over with [`Socket::noted`].
    pub fn keep(self) {
        std::mem::forget(self);
    }

    /// Connects, without waiting: a launcher with too many connections to accept is an error like others.
    pub fn connect(&self, to: &Address) -> io::Result<()> {
        let descriptor = self.descriptor()?;
        let address = (&raw const to.0).cast::<libc::sockaddr>();
        let bytes = libc::socklen_t::try_from(size_of_val(&to.0)).map_err(|_| ErrorKind::InvalidInput)?;
        // SAFETY: `address` points to a whole sockaddr_un of `bytes` bytes that outlives the call.
        checked(unsafe { libc::connect(descriptor, address, bytes) })?;
        // From here on reading waits.
        // SAFETY: F_SETFL takes a number; the descriptor is our socket, and no other code relies on its flags.
        checked(unsafe { libc::fcntl(descriptor, libc::F_SETFL, libc::O_RDWR) })?;
        Ok(())
    }

    /// Lets no read or write take longer than this.
    pub fn limit(&self, seconds: u16) -> io::Result<()> {
        let descriptor = self.descriptor()?;
        let limit = libc::timeval { tv_sec: seconds.into(), tv_usec: 0 };
        let bytes = libc::socklen_t::try_from(size_of_val(&limit)).map_err(|_| ErrorKind::InvalidInput)?;
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            let value = (&raw const limit).cast();
            // SAFETY: `value` points to a whole timeval of `bytes` bytes that outlives the call.
            checked(unsafe { libc::setsockopt(descriptor, libc::SOL_SOCKET, option, value, bytes) })?;
        }
        Ok(())
    }

    /// The descriptor, to send and receive others by.
    pub fn as_fd(&self) -> io::Result<BorrowedFd<'_>> {
        let descriptor = self.descriptor()?;
        // SAFETY: it is open and ours, and stays so as long as `self` unless the application meddles with it.
        Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    /// Waits until there is something to read, or the end, for no longer than `limit`. Whether there is.
    pub fn is_readable(&self, limit: Duration) -> io::Result<bool> {
        let mut wanted = libc::pollfd { fd: self.descriptor()?, events: libc::POLLIN, revents: 0 };
        let limit_ms = c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX);
        // SAFETY: poll writes to the one structure that it is given.
        Ok(checked(unsafe { libc::poll(&raw mut wanted, 1, limit_ms) })? > 0)
    }

    /// Ends the connection without closing the descriptor, so that a thread that reads from it wakes.
    pub fn hang_up(&self) {
        if let Ok(descriptor) = self.descriptor() {
            // SAFETY: shutdown takes plain numbers and changes nothing but the socket, which is ours.
            unsafe { libc::shutdown(descriptor, libc::SHUT_RDWR) };
        }
    }

    /// Sends descriptors after the message that has announced them.
    pub fn send(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        descriptors::send(self.as_fd()?, descriptors)
    }

    /// Receives the descriptors that a message has announced. They have numbers of the application's for as long as
    /// they are open, which is to be short.
    pub fn receive(&self, count: usize) -> io::Result<Vec<OwnedFd>> {
        descriptors::receive(self.as_fd()?, count)
    }

    /// The descriptor's number, if it still means our socket.
    fn descriptor(&self) -> io::Result<c_int> {
        if identity(self.descriptor) == Some((self.device, self.inode)) {
            Ok(self.descriptor)
        } else {
            Err(ErrorKind::NotConnected.into())
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Ok(descriptor) = self.descriptor() {
            close(descriptor);
        }
        if self.is_noted {
            // A fork that comes in between copies a number whose inode no longer fits, which is harmless.
            SLOT.descriptor.store(NONE, SeqCst);
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let descriptor = self.descriptor()?;
        // SAFETY: the pointer and the length are those of one live and writable buffer.
        counted(unsafe { libc::recv(descriptor, buffer.as_mut_ptr().cast(), buffer.len(), 0) })
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let descriptor = self.descriptor()?;
        // SAFETY: the pointer and the length are those of one live buffer. MSG_NOSIGNAL: a launcher that is
        // gone is an error, not a SIGPIPE for the application.
        counted(unsafe { libc::send(descriptor, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Moves a descriptor that was just made out of the application's way; returns the old one where the limit
/// on descriptors is too low for that.
pub(crate) fn moved_up(low: c_int) -> c_int {
    let mut least = HIGH_DESCRIPTOR;
    while least > low {
        // SAFETY: F_DUPFD_CLOEXEC takes a number and makes a new descriptor.
        let high = unsafe { libc::fcntl(low, libc::F_DUPFD_CLOEXEC, least) };
        if high >= 0 {
            close(low);
            return high;
        }
        least /= 2;
    }
    low
}

/// Device and inode of the socket that a number stands for; `None` if it stands for no socket.
fn identity(descriptor: c_int) -> Option<(u64, u64)> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat takes any number, and `status` has room for what it writes.
    if unsafe { libc::fstat(descriptor, status.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat succeeded, so it has written the whole structure.
    let status = unsafe { status.assume_init() };
    (status.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some((status.st_dev, status.st_ino))
}

fn close(descriptor: c_int) {
    // SAFETY: the callers pass a descriptor that they made or whose identity they have just checked.
    unsafe { libc::close(descriptor) };
}

#[cfg(test)]
pub mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::{Mutex, MutexGuard};

    use super::*;

    /// There is one slot per process, so the tests that fill it take turns.
    pub fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn place() -> (tempfile::TempDir, Address, std::path::PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let address = Address::new(path.as_os_str().as_encoded_bytes()).expect("an address");
        (directory, address, path)
    }

    #[test]
    fn addresses_that_no_socket_can_have_are_refused() {
        assert!(Address::new(b"").is_none());
        assert!(Address::new(b"/a\0b").is_none());
        assert!(Address::new(&[b'a'; 108]).is_none());
        assert!(Address::new(&[b'a'; 107]).is_some());
    }

    #[test]
    fn only_a_socket_counts_as_being_there() {
        let (_directory, address, path) = place();
        assert!(!address.exists());
        std::fs::write(&path, "").expect("a file");
        assert!(!address.exists());
        std::fs::remove_file(&path).expect("removed");
        let _listener = UnixListener::bind(&path).expect("a listener");
        assert!(address.exists());
    }

    #[test]
    fn bytes_go_both_ways_over_a_high_descriptor() {
        let _turn = turn();
        let (_directory, address, path) = place();
        let listener = UnixListener::bind(path).expect("a listener");
        let socket = Socket::open().expect("a socket");
        assert!(socket.descriptor >= HIGH_DESCRIPTOR);
        socket.connect(&address).expect("connected");
        let (mut peer, _) = listener.accept().expect("a peer");
        (&socket).write_all(b"there").expect("written");
        peer.write_all(b"back").expect("written");
        let mut five = [0; 5];
        peer.read_exact(&mut five).expect("read");
        let mut four = [0; 4];
        (&socket).read_exact(&mut four).expect("read");
        assert_eq!((&five, &four), (b"there", b"back"));
        socket.hang_up();
        assert_eq!((&socket).read(&mut four).expect("the end"), 0);
        drop(socket);
        assert_eq!(peer.read(&mut five).expect("the end"), 0);
        assert!(Socket::noted().is_none());
    }

    #[test]
    fn a_number_that_the_application_took_over_is_left_alone() {
        let _turn = turn();
        let (_directory, address, path) = place();
        let _listener = UnixListener::bind(path).expect("a listener");
        let socket = Socket::open().expect("a socket");
        socket.connect(&address).expect("connected");
        let number = socket.descriptor;
        let (theirs, mut their_peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
        // SAFETY: dup2 takes plain numbers; the number that it replaces is the socket's under test.
        let replaced = unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&theirs), number) };
        assert_eq!(replaced, number);
        drop(theirs);
        assert_eq!((&socket).write(b"x").expect_err("not ours").kind(), ErrorKind::NotConnected);
        assert_eq!((&socket).read(&mut [0]).expect_err("not ours").kind(), ErrorKind::NotConnected);
        socket.hang_up();
        drop(socket);
        assert!(identity(number).is_some(), "still the application's");
        their_peer.set_nonblocking(true).expect("set");
        assert_eq!(their_peer.read(&mut [0]).expect_err("open, and empty").kind(), ErrorKind::WouldBlock);
        close(number);
    }

    #[test]
    fn a_kept_socket_is_found_again() {
        let _turn = turn();
        let socket = Socket::open().expect("a socket");
        let number = socket.descriptor;
        socket.keep();
        let found = Socket::noted().expect("noted down");
        assert_eq!(found.descriptor, number);
        drop(found);
        assert!(identity(number).is_none());
    }

    #[test]
    fn a_brief_socket_is_not_taken_for_the_agents() {
        let _turn = turn();
        let (_directory, address, path) = place();
        let listener = UnixListener::bind(path).expect("a listener");
        let agents = Socket::open().expect("a socket");
        let brief = Socket::brief().expect("a socket");
        brief.connect(&address).expect("connected");
        brief.limit(1).expect("limited");
        let (mut peer, _) = listener.accept().expect("a peer");
        (&brief).write_all(b"x").expect("written");
        peer.read_exact(&mut [0]).expect("read");
        assert_eq!((&brief).read(&mut [0]).expect_err("in time").kind(), ErrorKind::WouldBlock);
        drop(brief);
        assert_eq!(peer.read(&mut [0]).expect("the end"), 0);
        let noted = Socket::noted().expect("the agent's");
        assert_eq!(noted.descriptor, agents.descriptor);
        noted.keep();
    }

    #[test]
    fn a_launcher_that_is_not_there_is_an_error() {
        let _turn = turn();
        let (_directory, address, path) = place();
        let socket = Socket::open().expect("a socket");
        assert_eq!(socket.connect(&address).expect_err("nothing").kind(), ErrorKind::NotFound);
        drop(UnixListener::bind(path).expect("a listener"));
        assert_eq!(socket.connect(&address).expect_err("stale").kind(), ErrorKind::ConnectionRefused);
    }
}
