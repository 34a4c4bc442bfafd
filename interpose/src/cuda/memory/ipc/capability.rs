//! The descriptor that stands for device memory, a multicast object or a pool: what a program gets from
//! cuMemExportToShareableHandle and cuMemPoolExportToShareableHandle.
//!
//! It is a sealed memfd, opened for reading, that says which memory it stands for. The program may pass it on in any
//! way, and CRIU saves it as any other memfd.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic `CKPTCAP1` (the last byte is the version) |
//! | 8 | 16 | key of the physical memory, of a pool: of one of its segments, little-endian as all numbers here |
//! | 24 | 8 | size of the memory, in bytes; of a pool: its number in its process |
//! | 32 | 4 | ID of the process that owns it |
//! | 36 | 4 | 0 for memory, 1 for a multicast object, 2 for a pool |
//! | 40 | 8 | checksum of all that (FNV-1a, 64 bits) |
//!
//! The owner of memory or of an object has to know when the last such descriptor is gone, wherever it is: in another process, or in a message that
//! nobody has received. The kernel knows. A lease for writing (fcntl(2), F_SETLEASE) is granted to an open file only if
//! nobody else has the file open. So the owner has the memfd open for writing, asks for a lease, and gives it back at
//! once.
//!
//! The kernel does not count the open file that memfd_create itself returns. That is the owner's, and CRIU restores it as
//! such: it gives it to the first open file of an inode that can be read and written, and opens all others by their names
//! in /proc. So the lease is asked for with another one, which is opened for that alone.

use std::ffi::{CString, c_int};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use ckpt_protocol::agent::ShareKey as Key;

use super::handle::checksum;
use crate::socket::moved_up;

const MAGIC: &[u8; 8] = b"CKPTCAP1";
const BYTES: usize = 48;
const CHECKSUM_AT: usize = BYTES - 8;
const SEALS: c_int = libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;

/// What a descriptor stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Memory,
    Multicast,
    Pool,
}

const KINDS: [(Kind, u32); 3] = [(Kind::Memory, 0), (Kind::Multicast, 1), (Kind::Pool, 2)];

impl Kind {
    fn number(self) -> u32 {
        KINDS.into_iter().find(|(kind, _)| *kind == self).map_or(0, |(_, number)| number)
    }

    fn of_number(number: u32) -> Option<Self> {
        KINDS.into_iter().find(|(_, known)| *known == number).map(|(kind, _)| kind)
    }
}

/// What such a descriptor says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Capability {
    pub key: Key,
    /// The size of the memory, or the number of the pool.
    pub bytes: u64,
    pub owner: u32,
    pub kind: Kind,
}

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Capability {
    fn encode(&self) -> [u8; BYTES] {
        let mut text = [0; BYTES];
        text[..8].copy_from_slice(MAGIC);
        text[8..24].copy_from_slice(&self.key.0.to_le_bytes());
        text[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        text[32..36].copy_from_slice(&self.owner.to_le_bytes());
        text[36..40].copy_from_slice(&self.kind.number().to_le_bytes());
        let sum = checksum(&text[..CHECKSUM_AT]);
        text[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        text
    }

    /// `None` for what is not ours, or damaged.
    fn decode(text: &[u8; BYTES]) -> Option<Self> {
        if &text[..8] != MAGIC || checksum(&text[..CHECKSUM_AT]).to_le_bytes() != text[CHECKSUM_AT..] {
            return None;
        }
        Some(Self {
            key: Key(u128::from_le_bytes(text[8..24].try_into().ok()?)),
            bytes: u64::from_le_bytes(text[24..32].try_into().ok()?),
            owner: u32::from_le_bytes(text[32..36].try_into().ok()?),
            kind: Kind::of_number(u32::from_le_bytes(text[36..40].try_into().ok()?))?,
        })
    }

    /// What a descriptor of the program's says; `None` if it is not ours.
    pub fn read(descriptor: c_int) -> Option<Self> {
        if !is_sealed(descriptor) {
            return None;
        }
        let mut text = [0; BYTES];
        // SAFETY: the pointer and the length are those of one live buffer.
        let got = unsafe { libc::pread(descriptor, text.as_mut_ptr().cast(), BYTES, 0) };
        (usize::try_from(got) == Ok(BYTES)).then(|| Self::decode(&text))?
    }

    /// A new descriptor, and the owner's view of it. Without /proc there is no such view. To be called inside
    /// [`crate::fork::while_none`].
    ///
    /// # Errors
    /// There is no memory, or no descriptor is left.
    pub fn create(&self) -> io::Result<(OwnedFd, Option<Root>)> {
        let text = self.encode();
        // SAFETY: the name is NUL-terminated; the call makes a new descriptor.
        let made = unsafe {
            libc::memfd_create(c"ckpt-device-memory".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        // SAFETY: it was just made, and has no other owner.
        let file = checked(made).map(|made| unsafe { OwnedFd::from_raw_fd(made) })?;
        // SAFETY: the pointer and the length are those of one live buffer.
        let written = unsafe { libc::pwrite(file.as_raw_fd(), text.as_ptr().cast(), BYTES, 0) };
        if usize::try_from(written) != Ok(BYTES) {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: F_ADD_SEALS takes a number.
        checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
        match reopened(file.as_raw_fd(), libc::O_RDONLY) {
            Ok(descriptor) => Ok((descriptor, Some(Root(Kept::of(file))))),
            Err(_) => Ok((file, None)),
        }
    }
}

/// Opens a memfd again.
fn reopened(descriptor: c_int, how: c_int) -> io::Result<OwnedFd> {
    let path = CString::new(format!("/proc/self/fd/{descriptor}"))?;
    // SAFETY: the path is NUL-terminated; the call makes a new descriptor.
    let opened = checked(unsafe { libc::open(path.as_ptr(), how | libc::O_CLOEXEC) })?;
    // SAFETY: it was just made, and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

fn is_sealed(descriptor: c_int) -> bool {
    // SAFETY: F_GET_SEALS takes any number.
    unsafe { libc::fcntl(descriptor, libc::F_GET_SEALS) == SEALS }
}

/// A descriptor that this library keeps open, away from those of the program, which may close or replace it none the
/// less.
#[derive(Debug)]
struct Kept(c_int);

impl Kept {
    /// To be called inside [`crate::fork::while_none`].
    fn of(descriptor: OwnedFd) -> Self {
        Self(moved_up(descriptor.into_raw_fd()))
    }

    /// Whether it is still a memfd of ours, open in this way.
    fn is_ours(&self, how: c_int) -> bool {
        // SAFETY: F_GETFL takes any number.
        let flags = unsafe { libc::fcntl(self.0, libc::F_GETFL) };
        flags >= 0 && flags & libc::O_ACCMODE == how && is_sealed(self.0)
    }

    fn close(&self, how: c_int) {
        if self.is_ours(how) {
            // SAFETY: it is a descriptor of ours, which nothing refers to any more.
            unsafe { libc::close(self.0) };
        }
    }
}

/// Whether a file that is open here for writing is, as far as the kernel counts, open nowhere else.
fn is_open_once(descriptor: c_int) -> bool {
    // SAFETY: F_SETLEASE takes numbers. Nobody else can open the file meanwhile, which would send this process a signal:
    // that takes a descriptor, and then there is no lease.
    let lease = |kind: c_int| unsafe { libc::fcntl(descriptor, libc::F_SETLEASE, kind) };
    let is_granted = lease(libc::F_WRLCK) == 0;
    if is_granted {
        lease(libc::F_UNLCK);
    }
    is_granted
}

/// The owner's view of the descriptors of its memory.
#[derive(Debug)]
pub(crate) struct Root(Kept);

impl Root {
    /// Whether a descriptor exists anywhere. True if the system does not tell.
    pub fn has_descriptors(&self) -> bool {
        if !self.0.is_ours(libc::O_RDWR) {
            return true;
        }
        // The first one if the kernel counts the root after all.
        let is_last = is_open_once(self.0.0)
            || reopened(self.0.0, libc::O_WRONLY).is_ok_and(|counted| is_open_once(counted.as_raw_fd()));
        !is_last
    }

    /// The root itself, for the launcher; `None` if the program has closed it.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: it is open and ours, and stays so as long as `self` unless the program meddles with it.
        self.0.is_ours(libc::O_RDWR).then(|| unsafe { BorrowedFd::borrow_raw(self.0.0) })
    }

    /// One more descriptor for the program.
    ///
    /// # Errors
    /// The system does not open it.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        if !self.0.is_ours(libc::O_RDWR) {
            return Err(io::ErrorKind::NotFound.into());
        }
        reopened(self.0.0, libc::O_RDONLY)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        self.0.close(libc::O_RDWR);
    }
}

/// A descriptor that a process keeps open as long as it has the memory, so that the owner keeps the memory.
#[derive(Debug)]
pub(crate) struct Hold(Kept);

impl Hold {
    /// Holds what a descriptor of the program stands for. To be called inside [`crate::fork::while_none`].
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn of(descriptor: c_int) -> io::Result<Self> {
        Ok(Self(Kept::of(duplicate(descriptor)?)))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.close(libc::O_RDONLY);
    }
}

fn duplicate(descriptor: c_int) -> io::Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes any number and makes a new descriptor.
    let made = checked(unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) })?;
    // SAFETY: it was just made, and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use ckpt_protocol::descriptors;

    use super::*;

    const CAPABILITY: Capability =
        Capability { key: Key(1 << 127 | 5), bytes: 4 << 20, owner: 7, kind: Kind::Memory };

    #[test]
    fn a_damaged_capability_is_none() {
        let text = CAPABILITY.encode();
        assert_eq!(Capability::decode(&text), Some(CAPABILITY));
        for kind in [Kind::Multicast, Kind::Pool] {
            let other = Capability { kind, ..CAPABILITY };
            assert_eq!(Capability::decode(&other.encode()), Some(other));
        }
        for bit in 0..BYTES * 8 {
            let mut damaged = text;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Capability::decode(&damaged), None, "bit {bit}");
        }
    }

    #[test]
    fn a_descriptor_says_what_it_stands_for_and_cannot_be_changed() {
        let (descriptor, _root) = CAPABILITY.create().expect("made");
        assert_eq!(Capability::read(descriptor.as_raw_fd()), Some(CAPABILITY));
        assert!(reopened(descriptor.as_raw_fd(), libc::O_RDWR).is_ok_and(|file| {
            // SAFETY: the pointer and the length are those of one live buffer.
            unsafe { libc::pwrite(file.as_raw_fd(), [0_u8].as_ptr().cast(), 1, 0) < 0 }
        }));
    }

    #[test]
    fn other_descriptors_are_not_ours() {
        let file = tempfile::tempfile().expect("a file");
        let (socket, _other) = UnixStream::pair().expect("a pair");
        for other in [file.as_raw_fd(), socket.as_raw_fd(), -1, 1 << 20] {
            assert_eq!(Capability::read(other), None);
        }
    }

    /// Wherever it is: open, duplicated, in a message that nobody has received.
    #[test]
    fn the_owner_knows_whether_a_descriptor_is_left() {
        let (descriptor, root) = CAPABILITY.create().expect("made");
        let root = root.expect("there is /proc");
        assert!(root.has_descriptors());
        let hold = Hold::of(descriptor.as_raw_fd()).expect("held");
        let (here, there) = UnixStream::pair().expect("a pair");
        descriptors::send(here.as_fd(), &[descriptor.as_fd()]).expect("sent");
        drop(descriptor);
        assert!(root.has_descriptors());
        drop(hold);
        assert!(root.has_descriptors(), "it is in the message");
        let received = descriptors::receive(there.as_fd(), 1).expect("received");
        assert_eq!(Capability::read(received[0].as_raw_fd()), Some(CAPABILITY));
        assert!(root.has_descriptors());
        drop(received);
        wait_for_the_last(&root);
        let again = root.descriptor().expect("opened");
        assert_eq!(Capability::read(again.as_raw_fd()), Some(CAPABILITY));
        assert!(root.has_descriptors());
        drop(again);
        wait_for_the_last(&root);
    }

    /// A process that another test has just forked may have a copy until its exec.
    fn wait_for_the_last(root: &Root) {
        let end = Instant::now() + Duration::from_secs(300);
        while root.has_descriptors() {
            assert!(Instant::now() < end, "there is none");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_descriptor_that_the_program_has_replaced_is_left_alone() {
        let (descriptor, root) = CAPABILITY.create().expect("made");
        let root = root.expect("there is /proc");
        let number = root.0.0;
        let other = tempfile::tempfile().expect("a file");
        // SAFETY: dup2 takes two numbers; what it closes is the root's, which is looked at before it is used.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), number) } >= 0);
        drop(descriptor);
        assert!(root.has_descriptors(), "nobody knows");
        assert!(root.descriptor().is_err());
        drop(root);
        // SAFETY: F_GETFD takes any number.
        assert!(unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0, "it was closed");
        // SAFETY: it is a duplicate of the file's, made above.
        unsafe { libc::close(number) };
    }
}
