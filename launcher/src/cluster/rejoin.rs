//! A launcher that starts again in its own process, after another one was lost: the scheduler notices nothing.
//! It is the same as if the same command were run again, so nothing of the lost session is left in it but, with `--replicas`, the
//! snapshots in memory.

use crate::persist::memory;
use crate::sys::descriptor_limit;
use std::ffi::OsString;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The first argument of such a start; the node rank follows, whether the run has begun, and the descriptor of the memory.
const ARGUMENT: &str = "__rejoin";
const BEGUN: &str = "begun";
const NEW: &str = "new";
const NO_MEMORY: &str = "-";

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

    /// Takes what [`Self::exec`] has added off the arguments. Also returns the memory that was passed on, see
    /// [`memory::pass_on`].
    #[must_use]
    pub fn take(arguments: &mut Vec<OsString>) -> Option<(Self, Option<RawFd>)> {
        let [first, rank, begun, memory] = arguments.get(1..5)? else { return None };
        if first != ARGUMENT {
            return None;
        }
        let (rank, has_begun) = (rank.to_str()?.parse().ok()?, begun == BEGUN);
        let memory = memory.to_str().and_then(|number| number.parse().ok());
        arguments.drain(1..5);
        Some((Self { rank, has_begun }, memory))
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
        let memory = memory::pass_on(self.rank).map_or(NO_MEMORY.to_owned(), |number| number.to_string());
        command.args([ARGUMENT, &self.rank.to_string(), begun, &memory]).args(arguments).exec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_those_of_the_first_start() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        let mut again = words("ckpt-run __rejoin 3 begun 7 --nodes 4 -- true");
        assert_eq!(Rejoin::take(&mut again), Some((Rejoin::begun(3), Some(7))));
        assert_eq!(again, words("ckpt-run --nodes 4 -- true"));
        let anew = Rejoin::take(&mut words("ckpt-run __rejoin 0 new -"));
        assert_eq!(anew, Some((Rejoin { rank: 0, has_begun: false }, None)));
        for other in
            ["ckpt-run", "ckpt-run __rejoin 3", "ckpt-run __rejoin x new -", "ckpt-run run __rejoin 3 new -"]
        {
            let mut arguments = words(other);
            assert!(Rejoin::take(&mut arguments).is_none() && arguments == words(other), "{other}");
        }
    }
}
