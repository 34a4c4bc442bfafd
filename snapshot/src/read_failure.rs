//! Classifies read errors: is the object damaged, is the object unreadable, or did the access fail? Every reader of
//! the store decides by [`classify`].

use rustix::io::Errno;
use std::io;

/// The cause of a failed read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFailure {
    /// The content is wrong: the object is missing, truncated, or altered. This is certain damage.
    Damaged,
    /// The object cannot be read. A disk reports this for a bad sector, but a network file system also reports it
    /// when its server is down. Readers skip the object as if it were damaged; nothing is removed because of it.
    Unreadable,
    /// The access failed: no connection, permission, file descriptor, or memory. The object itself may be intact.
    Access,
}

/// Classifies `error`, which occurred when an object was opened or read.
pub(crate) fn classify(error: &io::Error) -> ReadFailure {
    const UNREADABLE: [Errno; 9] = [
        Errno::IO,
        // Reported by disks and by file systems with checksums of their own.
        Errno::BADMSG,
        Errno::UCLEAN,
        Errno::NODATA,
        Errno::ILSEQ,
        // Not a regular file, or a symbolic link, which is never followed.
        Errno::LOOP,
        Errno::ISDIR,
        Errno::NOTDIR,
        Errno::NXIO,
    ];
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound => {
            ReadFailure::Damaged
        }
        _ if Errno::from_io_error(error).is_some_and(|errno| UNREADABLE.contains(&errno)) => {
            ReadFailure::Unreadable
        }
        _ => ReadFailure::Access,
    }
}

/// An error with the same errno, or the same kind and message.
pub(crate) fn copy_of(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_object_itself_count_as_damage() {
        let of = |errno: Errno| classify(&errno.into());
        assert_eq!(of(Errno::NOENT), ReadFailure::Damaged);
        assert_eq!(classify(&io::ErrorKind::UnexpectedEof.into()), ReadFailure::Damaged);
        assert_eq!(classify(&io::Error::new(io::ErrorKind::InvalidData, "truncated")), ReadFailure::Damaged);
        assert_eq!(of(Errno::IO), ReadFailure::Unreadable);
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::PERM, Errno::TIMEDOUT] {
            assert_eq!(of(errno), ReadFailure::Access, "{errno}");
        }
        assert_eq!(classify(&io::ErrorKind::ConnectionReset.into()), ReadFailure::Access);
    }
}
