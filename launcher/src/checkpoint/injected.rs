//! Fault actions on other processes (feature `faults`, for tests): `kill-criu`, `stop-criu`, `kill-rank`.

use crate::checkpoint::running_job::RunningJob;
use crate::criu::RestoreLimits;
use ckpt_snapshot::faults;
use parking_lot::Mutex;
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

static TARGET: Mutex<Option<(Weak<RunningJob>, i32)>> = Mutex::new(None);
static HANDLER: Once = Once::new();

/// The limits of a restore, as a test sets them.
pub fn shortened(limits: RestoreLimits<'_>) -> RestoreLimits<'_> {
    let limit = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(Duration::from_millis(text.parse().expect("milliseconds")))
    };
    RestoreLimits {
        silence: limit("CKPT_FAULT_SILENCE_MS").unwrap_or(limits.silence),
        stall: limit("CKPT_FAULT_STALL_MS").unwrap_or(limits.stall),
        ..limits
    }
}

/// Sets the job and the CRIU that the next fault affects.
pub fn aim(job: &Arc<RunningJob>, criu_pid: i32) {
    *TARGET.lock() = Some((Arc::downgrade(job), criu_pid));
    HANDLER.call_once(|| faults::on_other(act));
}

fn act(point: &str, action: &str) {
    let target = TARGET.lock().clone();
    let (job, criu_pid) = target.expect("a job to aim at");
    let job = job.upgrade().expect("the job lives");
    let victim = match action {
        "kill-criu" => criu_pid,
        "stop-criu" => {
            job.namespace.signal(criu_pid, false, libc::SIGSTOP).expect("CRIU was there");
            return;
        }
        // The newest process: a rank or a worker, not the command itself.
        "kill-rank" => {
            let survey = job.namespace.survey().expect("a survey");
            survey.pids.into_iter().filter(|pid| *pid != criu_pid).max().expect("a process")
        }
        other => panic!("CKPT_FAULT: unknown action {other} at {point}"),
    };
    job.namespace.signal(victim, false, libc::SIGKILL).expect("the victim was there");
}
