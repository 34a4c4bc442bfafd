//! How many files this process may have open. Parked device memory takes a descriptor for each piece of it, so a launcher
//! with agents takes as many as it may have. What it starts gets the limit that it was itself started with.

use rustix::io;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};
use std::sync::OnceLock;

static BEFORE: OnceLock<Rlimit> = OnceLock::new();

/// Raises the limit as far as that goes.
pub fn raise() {
    let before = BEFORE.get_or_init(|| getrlimit(Resource::Nofile));
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("the limit of open files stays at {:?}: {error}", before.current);
    }
}

/// Gives a process that we have just started the limit that it would have without [`raise`].
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
    fn what_is_started_has_the_limit_from_before() {
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
