//! Fault actions on other processes (feature `faults`, for tests): `kill-criu`, `stop-criu`, `kill-rank`.

use crate::checkpoint::running_job::RunningJob;
use ckpt_snapshot::faults;
use parking_lot::Mutex;
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

static TARGET: Mutex<Option<(Weak<RunningJob>, i32)>> = Mutex::new(None);
static HANDLER: Once = Once::new();

/// How long CRIU may be silent in a restore, if a test sets it.
pub fn silence() -> Option<Duration> {
    let text = std::env::var("CKPT_FAULT_SILENCE_MS").ok()?;
    Some(Duration::from_millis(text.parse().expect("CKPT_FAULT_SILENCE_MS: milliseconds")))
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
