//! A launcher that starts again in its own process, after another one was lost: the scheduler notices nothing.
//! It is the same as if the same command were run again, so nothing of the lost session is left in it.

use crate::sys::descriptor_limit;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The first argument of such a start; the node rank follows, and whether the run has begun.
const ARGUMENT: &str = "__rejoin";
const BEGUN: &str = "begun";
const NEW: &str = "new";

/// This launcher is to start again as the node of this rank.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("this launcher starts again as node {rank}")]
pub struct Rejoin {
    /// The node rank.
    pub rank: u32,
    /// Whether the run that `--resume` asked for has begun, on all nodes.
    pub has_begun: bool,
}

impl Rejoin {
    /// In a run that has begun.
    #[must_use]
    pub fn begun(rank: u32) -> Self {
        Self { rank, has_begun: true }
    }

    /// Takes what [`Self::exec`] has added off the arguments.
    #[must_use]
    pub fn take(arguments: &mut Vec<OsString>) -> Option<Self> {
        let (rank, has_begun) = match arguments.get(1..4)? {
            [first, rank, begun] if first == ARGUMENT => (rank.to_str()?.parse().ok()?, begun == BEGUN),
            _ => return None,
        };
        arguments.drain(1..4);
        Some(Self { rank, has_begun })
    }

    /// Starts this program again with the same arguments. Only returns if that is not possible.
    #[must_use]
    pub fn exec(&self) -> io::Error {
        if let Err(error) = descriptor_limit::restore_in(rustix::process::getpid()) {
            tracing::debug!("the limit of open files stays: {error}");
        }
        let mut arguments: Vec<_> = std::env::args_os().collect();
        let _ = Self::take(&mut arguments);
        let mut command = Command::new("/proc/self/exe");
        if !arguments.is_empty() {
            command.arg0(arguments.remove(0));
        }
        let begun = if self.has_begun { BEGUN } else { NEW };
        command.args([ARGUMENT, &self.rank.to_string(), begun]).args(arguments).exec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_those_of_the_first_start() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        let mut again = words("ckpt-run __rejoin 3 begun --nodes 4 -- true");
        assert_eq!(Rejoin::take(&mut again), Some(Rejoin::begun(3)));
        assert_eq!(again, words("ckpt-run --nodes 4 -- true"));
        let anew = Rejoin::take(&mut words("ckpt-run __rejoin 0 new"));
        assert_eq!(anew, Some(Rejoin { rank: 0, has_begun: false }));
        for other in
            ["ckpt-run", "ckpt-run __rejoin 3", "ckpt-run __rejoin x new", "ckpt-run run __rejoin 3 new"]
        {
            let mut arguments = words(other);
            assert!(Rejoin::take(&mut arguments).is_none() && arguments == words(other), "{other}");
        }
    }
}
