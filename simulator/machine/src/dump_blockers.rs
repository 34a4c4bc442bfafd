//! What makes CRIU refuse a process that has a device open, as the real driver's device files do: a descriptor and a
//! mapping, each refused on its own. The child of a fork inherits both, as it does the driver's (mappings of device
//! files are not `VM_DONTCOPY`: open-gpu-kernel-modules, kernel-open/nvidia/nv-mmap.c).
//!
//! The machines that run this have no device and no privilege, so the objects are ones that every Linux has and
//! CRIU (as of 4.2) does not save. Candidates that a kernel or a sandbox does not offer are skipped:
//!
//! | blocker | CRIU's answer | needs |
//! |---|---|---|
//! | userfaultfd for faults in user mode | unknown kind of descriptor | CONFIG_USERFAULTFD, Linux 5.11 |
//! | Landlock rule set | unknown kind of descriptor | CONFIG_SECURITY_LANDLOCK |
//! | descriptor of a memfd_secret | a file in no mount | CONFIG_SECRETMEM, Linux 5.14 |
//! | mapping of a memfd_secret | unknown mapping | the same, and a page of RLIMIT_MEMLOCK |
//! | mapping of a TCP socket | no packet socket of that number | IPv4, Linux 4.18 |

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use rustix::fs::ftruncate;
use rustix::mm::{ProtFlags, UserfaultfdFlags, userfaultfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::Mapping;

const PAGE_BYTES: usize = 4096;
/// `UFFD_USER_MODE_ONLY` of linux/userfaultfd.h: what an ordinary user may always ask for.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);

/// Two descriptors, as those of a device and of its control file, and the mapping, released when dropped.
pub struct DumpBlockers {
    _descriptors: [OwnedFd; 2],
    _mapping: Mapping,
}

type Candidate<T> = (&'static str, fn() -> io::Result<T>);

const DESCRIPTORS: [Candidate<OwnedFd>; 3] =
    [("userfaultfd", user_faults), ("Landlock rule set", landlock), ("memfd_secret", secret_file)];
const MAPPINGS: [Candidate<Mapping>; 2] = [("memfd_secret", secret), ("TCP socket", socket)];

impl DumpBlockers {
    /// Takes the first descriptor and the first mapping that this machine offers.
    ///
    /// # Errors
    /// Says what each candidate failed with.
    pub fn acquire() -> io::Result<Self> {
        Ok(Self {
            _descriptors: [first_of("descriptor", &DESCRIPTORS)?, first_of("descriptor", &DESCRIPTORS)?],
            _mapping: first_of("mapping", &MAPPINGS)?,
        })
    }
}

fn first_of<T>(what: &str, candidates: &[Candidate<T>]) -> io::Result<T> {
    let mut reasons = Vec::new();
    for (name, make) in candidates {
        match make() {
            Ok(made) => return Ok(made),
            Err(error) => reasons.push(format!("{name}: {error}")),
        }
    }
    Err(io::Error::other(format!("no {what} that CRIU refuses is available here: {}", reasons.join("; "))))
}

fn user_faults() -> io::Result<OwnedFd> {
    // SAFETY: nothing is registered with the descriptor, so it never receives a page fault.
    Ok(unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | USER_MODE_ONLY) }?)
}

fn landlock() -> io::Result<OwnedFd> {
    // The first version of struct landlock_ruleset_attr: which rights it handles, here that of executing a file
    // (LANDLOCK_ACCESS_FS_EXECUTE in linux/landlock.h). The set is never enforced.
    let handled_access_fs: u64 = 1;
    // SAFETY: the kernel reads 8 bytes from a live variable. The descriptor is close-on-exec by itself.
    let number = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled_access_fs, size_of::<u64>(), 0)
    };
    owned(number)
}

fn secret_file() -> io::Result<OwnedFd> {
    // SAFETY: the call takes a number.
    let file = owned(unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) })?;
    ftruncate(&file, PAGE_BYTES as u64)?;
    Ok(file)
}

fn secret() -> io::Result<Mapping> {
    let file = secret_file()?;
    Mapping::inherited(file.as_fd(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE)
}

fn socket() -> io::Result<Mapping> {
    // A TCP socket can be mapped to receive without a copy (tcp_mmap). It is never connected.
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    Mapping::inherited(socket.as_fd(), PAGE_BYTES, ProtFlags::READ)
}

fn owned(number: libc::c_long) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this number, and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_any_candidate_gets_the_reasons() {
        let refused: [Candidate<()>; 2] =
            [("one", || Err(io::Error::other("no luck"))), ("two", || Err(io::Error::other("none either")))];
        let error = first_of("descriptor", &refused).unwrap_err().to_string();
        assert!(error.contains("one: no luck; two: none either"), "{error}");
    }

    #[test]
    fn a_candidate_that_is_refused_is_passed_over() {
        let candidates: [Candidate<u32>; 2] = [("one", || Err(io::Error::other("no"))), ("two", || Ok(2))];
        assert_eq!(first_of("mapping", &candidates).unwrap(), 2);
    }
}
