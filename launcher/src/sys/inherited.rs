//! A descriptor that this process passes on to the program that it executes in its own place.
#![allow(unsafe_code)]

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Has the descriptor stay open when this process executes a program. Returns its number, for [`take`] there.
///
/// # Errors
/// When the kernel refuses.
pub fn pass_on(descriptor: &OwnedFd) -> io::Result<RawFd> {
    fcntl_setfd(descriptor, fcntl_getfd(descriptor)? - FdFlags::CLOEXEC)?;
    Ok(descriptor.as_raw_fd())
}

/// The descriptor of this number, which the program before has passed on. Processes that this one starts do not get it.
///
/// # Errors
/// When there is none, or it was not passed on.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: nobody else in this process has it: it was passed on, as is checked next, for one call of this function.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    let checked = fcntl_getfd(&descriptor).map_err(io::Error::from).and_then(|flags| {
        let is_passed_on = !flags.contains(FdFlags::CLOEXEC);
        if is_passed_on { Ok(flags) } else { Err(io::ErrorKind::InvalidInput.into()) }
    });
    match checked {
        Ok(flags) => {
            fcntl_setfd(&descriptor, flags | FdFlags::CLOEXEC)?;
            Ok(descriptor)
        }
        Err(error) => {
            // It is somebody else's, or none.
            std::mem::forget(descriptor);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    #[test]
    fn a_descriptor_is_taken_once() {
        let own: OwnedFd = std::fs::File::open("/").unwrap().into();
        let number = own.as_raw_fd();
        assert!(take(number).is_err(), "it was not passed on");
        assert_eq!(pass_on(&own).unwrap(), number);
        let taken = take(own.into_raw_fd()).unwrap();
        assert!(fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        assert!(take(number).is_err(), "it was taken");
        for none in [0, 2, -1, 1 << 20] {
            assert!(take(none).is_err(), "{none}");
        }
    }
}
