//! What follows on a session, or a start, that has failed on some node while all launchers are there: node 0 decides by the
//! restart policy, all others wait. Signals and calls are served meanwhile.

use super::AGAIN;
use super::parts::held_parts;
use crate::cluster::{Cluster, End, Load, Notice, Restart, Resumable, StopHow};
use crate::job::journal::{Entry, EventKind};
use crate::namespace;
use crate::supervise::Supervisor;
use crate::supervise::events::{self, Event};
use crate::supervise::policy::{Failure, Next};
use crate::supervise::startup::OpenedJob;
use crate::sys::deadline::KILLED_JOB_POLL_INTERVAL;
use crate::sys::error::EXIT_OWN;
use anyhow::Result;
use ckpt_protocol::control::{Reply, Stopped};
use ckpt_snapshot::{SnapshotId, Store as _};
use std::time::{Duration, Instant};

impl Supervisor<'_> {
    /// Waits for the next session. The error is the end of the job on all nodes.
    pub(super) fn next_session(
        &mut self,
        cluster: &Cluster,
        ended: Option<(End, Failure)>,
    ) -> Result<Load, End> {
        let mut resume_at = ended.and_then(|(end, failure)| self.decide(cluster, end, &failure));
        loop {
            let timer = resume_at.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
            crossbeam_channel::select! {
                recv(cluster.notices()) -> notice => match notice {
                    Ok(Notice::Load(load)) => return Ok(load),
                    Ok(Notice::End(end)) => return Err(end),
                    Ok(Notice::Over(end)) => {
                        let failure = Failure { is_resumed: self.began_from.is_some(), ..Failure::default() };
                        let entry = Entry::new(EventKind::NotStarted, &end.why[..]);
                        self.context.opened.journal.add(&entry.measured(self.begin_measured()));
                        resume_at = self.decide(cluster, end, &failure);
                    }
                    Ok(Notice::Restarting(restart)) => self.note(&restart),
                    Ok(_) => {}
                    Err(_) => return Err(no_thread()),
                },
                recv(self.context.inbox) -> event => {
                    if let Ok(event) = event {
                        self.serve_idle(cluster, event);
                    }
                }
                recv(timer) -> _ => {
                    resume_at = None;
                    cluster.resume(self.resumable(cluster));
                }
            }
        }
    }

    /// At node 0: whether and when the job is restarted.
    fn decide(&mut self, cluster: &Cluster, end: End, failure: &Failure) -> Option<Instant> {
        if cluster.rank() != 0 {
            return None;
        }
        // The first start of all: who has started the launchers is there to see it.
        let is_first = self.is_first && self.context.config.nodes.rejoins_as.is_none();
        // Counts from the policy's state before this failure.
        let older = self.older_one();
        let failure = Failure { next_older_by: older.as_ref().map(|older| older.older_by), ..*failure };
        let next =
            if is_first && !failure.has_run { Next::GiveUp(None) } else { self.policy.after(&failure) };
        self.older_than = end.hung_since().and_then(|since| self.first_taken_after(since));
        if let (Next::StepBack(_), Some(older)) = (&next, older) {
            self.older_than = Some(older.left_out);
        }
        match next {
            Next::GiveUp(reason) => {
                if let Some(reason) = &reason {
                    let entry = Entry::new(EventKind::GaveUp, &reason[..]).remedy(Some(AGAIN));
                    self.context.opened.journal.add(&entry);
                }
                let reason = reason.map(|reason| format!("; it is not restarted: {reason}"));
                // The code of bad input would mean that nothing was changed, and the job has run.
                let is_own = !is_first && !failure.has_run;
                let code = if is_own { EXIT_OWN } else { end.code };
                cluster.give_up(End { why: end.why + &reason.unwrap_or_default(), code, ..end });
                None
            }
            Next::Again(wait) | Next::StepBack(wait) => {
                let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
                let from = match &self.older_than {
                    Some(id) if self.is_first_of_run(id) => {
                        "from the first snapshot of the run, which may hold what makes it fail: there is no older one"
                    }
                    Some(_) => "from an older snapshot: newer ones may hold what makes it fail",
                    None => "from the newest snapshot, or from the beginning if there is none",
                };
                let (why, from, restarts) = (end.why, from.to_owned(), self.policy.restarts);
                cluster.announce(Restart { why, restarts, wait_ms, from });
                Some(Instant::now() + wait)
            }
        }
    }

    /// At node 0: what the next session may be resumed from.
    fn resumable(&mut self, cluster: &Cluster) -> Resumable {
        let older_than = self.older_than.take();
        // Rather the first snapshot of the run than one of the later ones, if they all may contain what made the job fail.
        let older_than = older_than.map(|id| (self.is_first_of_run(&id), id));
        resumable(self.context.opened, cluster.log().0, older_than).unwrap_or_else(|error| {
            tracing::warn!("snapshots that may contain what made the job fail are not left out: {error:#}");
            Resumable::default()
        })
    }

    /// An event while the job does not run here.
    fn serve_idle(&self, cluster: &Cluster, event: Event) {
        let is_ending =
            |signal| events::is_stopping(signal) || self.context.config.on_signal.contains(&signal);
        match event {
            Event::Signal(signal) if is_ending(signal) => {
                cluster.stop(format!("its launcher received {}", events::name(signal)), StopHow::Preempt);
            }
            Event::Preempt(why, call) => {
                let problem = "the job was not running: it had failed, and was to be restarted";
                let stopped = Stopped { snapshot: None, problem: Some(problem.to_owned()) };
                let _ = call.map(|call| call.answer.send(Reply::Stopped(stopped)));
                cluster.stop(why, StopHow::Preempt);
            }
            Event::CheckpointRequested(answer) | Event::ReclaimRequested(answer) => {
                let reply = "the job is not running: it failed, and is being restarted";
                let _ = answer.send(Reply::Error(reply.to_owned()));
            }
            _ => {}
        }
    }

    fn note(&mut self, restart: &Restart) {
        let Restart { why, restarts, wait_ms, from } = restart;
        let wait = Duration::from_millis(*wait_ms);
        let next = format!("restart {restarts} on all nodes in {:.1} s, {from}", wait.as_secs_f64());
        tracing::warn!("the job failed: {why}. {next}");
        self.policy.restarts = *restarts;
        self.context.opened.journal.add(&Entry::new(EventKind::Restarting, next));
        self.context.status.waits(why, wait, *restarts);
    }
}

/// The parts of this log in the store. Those that were taken after the snapshot `older_than` are excluded, and so is that one
/// unless it stays.
fn resumable(opened: &OpenedJob, log: &str, older_than: Option<(bool, SnapshotId)>) -> Result<Resumable> {
    let taken_ms = |id: &SnapshotId| Ok::<_, anyhow::Error>(opened.store.manifest(id)?.taken_unix_ms);
    let first_ms = match older_than {
        Some((stays, id)) => Some(taken_ms(&id)? + u64::from(stays)),
        None => None,
    };
    let (mut held, mut excluded) = (Vec::new(), Vec::new());
    for (id, part) in held_parts(opened)?.into_iter().filter(|(_, part)| part.log == log) {
        held.push(part.attempt);
        if let Some(first_ms) = first_ms
            && taken_ms(&id)? >= first_ms
        {
            excluded.push(part.attempt);
        }
    }
    Ok(Resumable { held: Some(held), excluded })
}

/// Waits until the processes of a session that was killed have ended.
pub(super) fn await_processes() {
    let mut is_reported = false;
    while namespace::is_ending() {
        if !std::mem::replace(&mut is_reported, true) {
            tracing::warn!("the restart waits until the processes of the killed job have ended");
        }
        std::thread::sleep(KILLED_JOB_POLL_INTERVAL);
    }
}

/// The thread for the other nodes has ended without an End.
pub(super) fn no_thread() -> End {
    let why = "a bug in ckpt-run ended the connection to the other nodes".to_owned();
    End::failure(why, EXIT_OWN)
}
