//! The limit of open files. Parked device memory needs a descriptor per allocation for as long as the allocation lives, so a
//! launcher with agents raises its soft limit to the hard limit. Child processes get the original limit.

use rustix::io;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};
use std::sync::OnceLock;

static BEFORE: OnceLock<Rlimit> = OnceLock::new();

/// Raises the soft limit to the hard limit.
pub fn raise() {
    let before = BEFORE.get_or_init(|| getrlimit(Resource::Nofile));
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("the limit of open files stays at {:?}: {error}", before.current);
    }
}

/// How many files this process may have open.
#[must_use]
pub fn current() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Gives a child process the limit that it would have without [`raise`].
///
/// # Errors
/// What the kernel says.
pub fn restore_in(pid: Pid) -> io::Result<()> {
    let Some(before) = BEFORE.get() else { return Ok(()) };
    let limit = Rlimit { current: before.current, maximum: before.maximum };
    prlimit(Some(pid), Resource::Nofile, limit).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    fn child_processes_have_the_original_limit() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(777), maximum }).unwrap();
        raise();
        assert_eq!(getrlimit(Resource::Nofile).current, maximum);
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "read line; ulimit -n"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        restore_in(Pid::from_child(&shell)).unwrap();
        drop(shell.stdin.take());
        let mut said = String::new();
        shell.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        shell.wait().unwrap();
        assert_eq!(said.trim(), "777");
    }
}
