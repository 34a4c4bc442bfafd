//! What the failure of a read says of the object that was to be read: the one place that decides it.

use rustix::io::Errno;
use std::io;

/// What is to blame for a read that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// What lies there: it is gone, cut short, or something else.
    Content,
    /// The object, which cannot be read. A disk says so of a bad sector; a file system in the network also when its
    /// server is away. So a reader passes it over as if it were damaged, and nobody removes anything because of it.
    Object,
    /// The way to it: no connection, no permission, no descriptor, no memory. It says nothing of the object.
    Way,
}

/// What is to blame for `error`, of opening or reading an object.
pub(crate) fn blame(error: &io::Error) -> Blame {
    const OBJECT: [Errno; 9] = [
        Errno::IO,
        // Of file systems that have checksums of their own, and of disks.
        Errno::BADMSG,
        Errno::UCLEAN,
        Errno::NODATA,
        Errno::ILSEQ,
        // No file, or one that is not to be followed.
        Errno::LOOP,
        Errno::ISDIR,
        Errno::NOTDIR,
        Errno::NXIO,
    ];
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound => Blame::Content,
        _ if Errno::from_io_error(error).is_some_and(|errno| OBJECT.contains(&errno)) => Blame::Object,
        _ => Blame::Way,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_says_something_of_the_object_is_held_against_it() {
        let of = |errno: Errno| blame(&errno.into());
        assert_eq!(of(Errno::NOENT), Blame::Content);
        assert_eq!(blame(&io::ErrorKind::UnexpectedEof.into()), Blame::Content);
        assert_eq!(blame(&io::Error::new(io::ErrorKind::InvalidData, "it is cut off")), Blame::Content);
        assert_eq!(of(Errno::IO), Blame::Object);
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::PERM, Errno::TIMEDOUT] {
            assert_eq!(of(errno), Blame::Way, "{errno}");
        }
        assert_eq!(blame(&io::ErrorKind::ConnectionReset.into()), Blame::Way);
    }
}
