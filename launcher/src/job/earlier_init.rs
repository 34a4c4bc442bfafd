//! The init of the job's last session. When a launcher is killed, the kernel releases the job's lock at once, but the init
//! and the processes of the job end some time later. Until then they can write files and hold ports. So a start waits.

use crate::job::journal::{Entry, EventKind, Journal};
use crate::namespace::{Namespace, pid_namespace_of, remaining_processes};
use crate::sys::authentic::{opened, sealed};
use crate::sys::deadline::{EARLIER_SESSION_REPORT, PROCESS_POLL_INTERVAL};
use crate::sys::host;
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, read_regular, write_atomically};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// In the job's directory.
const FILE: &str = "init.json";
/// A longer record is damaged (bytes).
const MAX_BYTES: u64 = 4096;

/// What to do about processes that do not end.
const UNKILLABLE: &str = "One that waits for an unresponsive device or file system cannot be killed: check `dmesg`, GPUs and network file systems";

/// A process, by what no other process has while the machine is up.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Init {
    boot_id: String,
    /// The launcher's PID namespace (inode), in which the process has this ID.
    pid_namespace: Option<u64>,
    pid: i32,
    /// When the process began, in ticks of the kernel's clock since the boot.
    start_time: u64,
}

impl Init {
    /// `None` if the process has ended: an init ends after all other processes of its namespace.
    fn of(pid: i32) -> Option<Self> {
        let stat = Stat::from_file(format!("/proc/{pid}/stat")).ok()?;
        let has_ended = matches!(stat.state, 'Z' | 'X');
        (!has_ended).then(|| Self {
            boot_id: host::facts().boot_id,
            pid_namespace: pid_namespace_of(std::process::id().cast_signed()),
            pid,
            start_time: stat.starttime,
        })
    }

    fn runs(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

/// Records the init of the session that begins.
///
/// # Errors
/// When that cannot be written.
pub fn record(dir: &JobDir, namespace: &Namespace) -> Result<()> {
    let path = dir.path().join(FILE);
    let text = serde_json::to_string(&Init::of(namespace.init_pid()).context("the job's init has ended")?)?;
    write_atomically(&path, sealed(&dir.file_key(FILE), &text).as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Waits until all processes of the job's last session have ended, if it was on this machine. The caller has the job's
/// lock.
pub fn wait_for_end(dir: &JobDir, journal: &Journal) {
    let text = read_regular(&dir.path().join(FILE), MAX_BYTES).unwrap_or_default();
    let init = opened(&dir.file_key(FILE), &text).and_then(|text| serde_json::from_slice::<Init>(text).ok());
    let Some(init) = init else { return };
    let (begun, mut is_reported) = (Instant::now(), false);
    while init.runs() {
        if !is_reported && begun.elapsed() >= EARLIER_SESSION_REPORT {
            let what = format!(
                "waiting until the processes of its earlier session have ended: {}",
                remaining_processes(init.pid).join(", ")
            );
            journal.add(&Entry::new(EventKind::Waiting, &what[..]).remedy(Some(UNKILLABLE)));
            tracing::warn!("job {}: {what}. {UNKILLABLE}", dir.key());
            is_reported = true;
        }
        std::thread::sleep(PROCESS_POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_runs_until_it_has_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let init = Init::of(child.id().cast_signed()).unwrap();
        assert!(init.runs());
        for other in [
            Init { start_time: init.start_time + 1, ..Init::of(init.pid).unwrap() },
            Init { boot_id: "x".to_owned(), ..Init::of(init.pid).unwrap() },
            Init { pid_namespace: Some(1), ..Init::of(init.pid).unwrap() },
        ] {
            assert!(!other.runs(), "{other:?} is another process");
        }
        child.kill().unwrap();
        while init.runs() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!init.runs());
    }
}
