//! The end of a job session: with a last snapshot, by a kill, or by itself.

use super::JobSession;
use crate::agents::Loss;
use crate::checkpoint::attempt::AfterDump;
use crate::checkpoint::running_job::RunningJob;
use crate::cluster::End;
use crate::job::journal::{Entry, EventKind};
use crate::job::ownership::OwnershipError;
use crate::namespace::stdio::{self, Tail};
use crate::observe::control_server::Answer;
use crate::supervise::events::{self, Hang, StopCall};
use crate::supervise::services::RunContext;
use crate::sys::deadline::{
    CANCELLED_CHECKPOINT_TIMEOUT, GPU_RELEASE_TIMEOUT, KILLED_JOB_REPORT_TIMEOUT, LAST_OUTPUT_TIMEOUT,
    LEFTOVER_EXIT_TIMEOUT, OUTCOME_RETRY_INTERVAL, OUTCOME_RETRY_TIMEOUT, OUTCOME_WRITE_TIMEOUT,
    STORE_RETRY_TIMEOUT, USER_STOP_WINDOW, within,
};
use crate::sys::error::{EXIT_OWN, EXIT_PREEMPTED};
use crate::sys::path_text::shown;
use anyhow::anyhow;
use ckpt_protocol::control::{Reply, Saved, Stopped};
use ckpt_snapshot::JobOutcome;
use signal_hook::consts::{SIGINT, SIGKILL, SIGTERM};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// How many of the processes that a command has left running are named.
const LEFTOVERS_NAMED: usize = 5;

/// How a job session ended.
#[derive(Debug)]
pub enum SessionOutcome {
    /// The command exited with 0.
    Complete,
    /// The job failed.
    Failed {
        /// The exit code of ckpt-run if the job is not restarted.
        code: i32,
        /// What happened.
        what: String,
        /// The error to report if the job is not restarted; none if the job's own output has the reason.
        error: Option<anyhow::Error>,
        /// When the job began to hang, if it did: later snapshots contain the hang.
        hung_since: Option<SystemTime>,
    },
    /// Of a job on several nodes: the session is over on all of them, and another one may follow.
    OverOnNodes(End),
    /// The job's user stopped it.
    StoppedByUser {
        /// The job's exit code.
        code: i32,
    },
    /// The job was preempted, or stopped by `ckpt-run stop`: exit code 75.
    Preempted {
        /// What the journal says about it, after the job's last output.
        entry: Box<Entry>,
        /// The end of the grace period.
        until: Instant,
        /// A signal began the ending: another one ends everything at once.
        signalled: bool,
    },
}

impl SessionOutcome {
    fn hung(hang: &Hang, code: i32) -> Self {
        let what = format!("it hung: {}", hang.describe());
        Self::Failed { code, what, error: None, hung_since: Some(hang.since) }
    }
}

/// The end of a job session.
pub struct SessionEnd {
    /// How it ended.
    pub outcome: SessionOutcome,
    /// How long the job ran.
    pub duration: Duration,
    /// When the last snapshot was taken, counted from the begin of the session. If the job hung, the last one before.
    pub saved_after: Option<Duration>,
    /// When the job's command ended.
    pub ended_at: SystemTime,
}

/// What becomes of a job that cannot be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IfUnsaved {
    /// It gets SIGTERM, and is killed at the end of the grace period.
    Terminate,
    /// It runs on: `ckpt-run stop`.
    RunOn,
    /// The key Ctrl-C is passed on to it.
    PassKeyOn,
}

/// The job is being ended, with a snapshot if possible.
pub(super) struct Ending {
    /// The end of the grace period, or of the wait for a killed job.
    deadline: Instant,
    /// When the job gets SIGTERM if its last snapshot has not begun by then.
    sigterm_at: Instant,
    /// A signal began the ending: another one ends the job at once.
    pub(super) signalled: bool,
    pub(super) if_unsaved: IfUnsaved,
    /// Callers that wait for the end.
    answers: Vec<Answer>,
    pub(super) saved: Option<Saved>,
    /// Why there is no snapshot.
    problem: Option<String>,
    sigterm_sent: bool,
    /// The job was killed; nothing is waited for any more.
    killed: bool,
}

impl Ending {
    /// When the state of the ending has to be checked next.
    pub(super) fn next_deadline(&self) -> Instant {
        if self.needs_no_sigterm() { self.deadline } else { self.sigterm_at.min(self.deadline) }
    }

    /// Whether SIGTERM was sent, or need not be sent before the deadline.
    fn needs_no_sigterm(&self) -> bool {
        self.sigterm_sent || self.killed || self.sigterm_at >= self.deadline
    }

    /// Whether the ending goes on after its deadline: only the user waits, and may end it at once.
    fn may_be_extended(&self) -> bool {
        self.if_unsaved != IfUnsaved::Terminate && !self.killed
    }

    /// From now on the job is ended within the grace period, also if it cannot be saved.
    pub(super) fn terminate_within(&mut self, grace: Duration) {
        if self.if_unsaved != IfUnsaved::Terminate && !self.killed {
            self.deadline = Instant::now() + grace;
            self.sigterm_at = Instant::now() + grace / 2;
        }
        self.if_unsaved = IfUnsaved::Terminate;
    }

    fn reply(&self, reply: &Reply) {
        for answer in &self.answers {
            let _ = answer.send(reply.clone());
        }
    }
}

/// Records the last output, which a resume may cut off the user's log. An encrypted store has nothing in the clear that
/// the job has written.
fn record_output(shared: &RunContext, tail: &Tail) {
    let text = tail.text();
    if !text.is_empty() && shared.config.store.key.is_none() {
        shared.opened.journal.add(&Entry::new(EventKind::Output, text));
    }
}

impl JobSession<'_> {
    pub(super) fn is_over(&self) -> bool {
        if self.awaits_nodes() {
            return false;
        }
        let is_killed = self.ending.as_ref().is_some_and(|ending| ending.killed);
        let is_late = || self.ending.as_ref().is_some_and(|ending| ending.deadline <= Instant::now());
        match self.exit_code {
            Some(_) => self.pending_checkpoints == 0 || is_killed,
            None => is_killed && is_late(),
        }
    }

    pub(super) fn ending_timer_expired(&mut self) {
        match &self.ending {
            // Nobody but the user waits: the snapshot is stored, however long that takes.
            Some(ending) if ending.may_be_extended() && ending.deadline <= Instant::now() => {
                self.extend_ending();
            }
            Some(ending) if !ending.killed && ending.deadline <= Instant::now() => {
                let grace = humantime::format_duration(self.shared.config.grace);
                self.kill(format!("it was not durable within {grace} (--grace)"));
            }
            Some(ending) if !ending.needs_no_sigterm() && ending.sigterm_at <= Instant::now() => {
                self.give_up_waiting_snapshot();
            }
            _ => {}
        }
    }

    fn extend_ending(&mut self) {
        let grace = self.shared.config.grace;
        if let Some(ending) = &mut self.ending {
            ending.deadline = Instant::now() + grace;
            ending.sigterm_at = ending.deadline;
        }
    }

    /// Begins the ending: takes a last snapshot, with which the job ends.
    pub(super) fn preempt(&mut self, why: &str, call: Option<StopCall>, signal: Option<i32>) {
        if let Some(cluster) = self.shared.nodes {
            return self.stop_all(cluster, why, call);
        }
        let if_unsaved = match (&call, signal) {
            (Some(call), _) if !call.force => IfUnsaved::RunOn,
            (_, Some(SIGINT)) => IfUnsaved::PassKeyOn,
            _ => IfUnsaved::Terminate,
        };
        let answer = call.map(|call| call.answer);
        let grace = self.shared.config.grace;
        if let Some(ending) = &mut self.ending {
            if if_unsaved == IfUnsaved::Terminate {
                ending.terminate_within(grace);
            }
            return ending.answers.extend(answer);
        }
        say_ending(why, if_unsaved, signal.is_some(), grace);
        self.shared.opened.journal.add(&Entry::new(EventKind::Preempted, why));
        let now = Instant::now();
        self.ending = Some(Ending {
            deadline: now + grace,
            // Otherwise the user decides how long to wait.
            sigterm_at: now + if if_unsaved == IfUnsaved::Terminate { grace / 2 } else { grace },
            signalled: signal.is_some(),
            if_unsaved,
            answers: answer.into_iter().collect(),
            saved: None,
            problem: None,
            sigterm_sent: false,
            killed: false,
        });
        self.schedule(None);
        self.hurry();
        if self.exit_code.is_none() {
            let limit = if if_unsaved == IfUnsaved::Terminate { grace } else { Duration::MAX };
            self.request_checkpoint(None, AfterDump::End(limit));
        }
    }

    /// All that is left to do is to store the last snapshot.
    fn hurry(&self) {
        self.checkpoints.hurry();
        self.shared.opened.pace.hurry();
        self.shared.uploader.iter().for_each(|uploader| uploader.hurry());
        self.shared.persister.iter().for_each(|persister| persister.hurry());
    }

    /// The job runs on after all.
    pub(super) fn relax(&self) {
        self.checkpoints.relax();
        self.shared.opened.pace.relax();
        self.shared.uploader.iter().for_each(|uploader| uploader.relax());
        self.shared.persister.iter().for_each(|persister| persister.relax());
    }

    /// Half of the grace period is over. If the last snapshot still waits for an earlier one to be stored, the job gets
    /// the rest of the time: that earlier snapshot is nearly as good.
    fn give_up_waiting_snapshot(&mut self) {
        let is_waiting = self.exit_code.is_none() && self.checkpoints.withdraw_final();
        match &mut self.ending {
            Some(_) if is_waiting => {
                self.final_snapshot_failed("an earlier snapshot is still being stored");
            }
            // The last snapshot is in progress.
            Some(ending) => ending.sigterm_at = ending.deadline,
            None => {}
        }
    }

    /// Without a last snapshot, the job may use the rest of the grace period to end by itself.
    pub(super) fn final_snapshot_failed(&mut self, reason: &str) {
        let is_running = self.exit_code.is_none();
        let is_given_up = |ending: &mut Ending| ending.if_unsaved != IfUnsaved::Terminate && is_running;
        if let Some(ending) = self.ending.take_if(is_given_up) {
            self.relax();
            self.report_failure(reason);
            let text =
                format!("the job runs on: {reason}. `ckpt-run stop --force` ends it without a snapshot");
            ending.reply(&Reply::Error(text));
            if ending.if_unsaved == IfUnsaved::PassKeyOn {
                self.pass_key_on();
            }
            return;
        }
        let Some(ending) = &mut self.ending else { return };
        ending.problem = Some(reason.to_owned());
        // Meanwhile, a snapshot that is only in memory is copied to the store.
        if let Some(persister) = &self.shared.persister {
            persister.begin_last_copy();
        }
        if self.exit_code.is_none() {
            ending.sigterm_sent = true;
            tracing::warn!("the job cannot be saved: {reason}. Sending SIGTERM, so that it ends by itself");
            self.forward_signal(SIGTERM);
        }
    }

    /// The job cannot be saved, and its user wants it to end: it gets the key that was kept from it.
    fn pass_key_on(&mut self) {
        let lost = match self.shared.good_snapshot() {
            Some(id) => format!("If it ends now, what it has done since its snapshot {id} is lost"),
            None => "If it ends now, all that it has done is lost: it has no snapshot".to_owned(),
        };
        tracing::warn!("the job cannot be saved, so it gets SIGINT without a snapshot. {lost}");
        self.user_stop = Some(Instant::now());
        if !self.job.stdio.type_interrupt() {
            self.forward_signal(SIGINT);
        }
    }

    /// Ends the job, and the checkpoint that is being stored, at once.
    pub(super) fn kill(&mut self, reason: String) {
        self.checkpoints.cancel();
        self.kill_job();
        if let Some(ending) = &mut self.ending {
            ending.problem.get_or_insert(reason);
            ending.killed = true;
            ending.deadline = Instant::now() + KILLED_JOB_REPORT_TIMEOUT;
        }
    }

    pub(super) fn kill_job(&mut self) {
        if self.exit_code.is_some() {
            return;
        }
        self.is_killed = true;
        self.release_gpus();
        if let Err(error) = self.job.namespace.signal(-1, false, SIGKILL) {
            tracing::warn!("the job cannot be killed: {error}");
        }
    }

    /// The job's processes are killed next.
    fn release_gpus(&self) {
        if let Some(agents) = &self.job.agents {
            agents.release(GPU_RELEASE_TIMEOUT);
        }
    }

    /// Kills a job that has lost GPU state: it cannot continue, and would wait for that state for ever.
    pub(super) fn end_after_loss(&mut self, loss: Loss) {
        if self.loss.is_some() || self.exit_code.is_some() {
            return tracing::debug!("GPU state is lost in another process: {loss}");
        }
        tracing::error!("{loss}. The job cannot continue and is ended");
        if let Some(agents) = &self.job.agents {
            agents.await_others(&loss.process, GPU_RELEASE_TIMEOUT);
        }
        self.kill_job();
        self.loss = Some(loss);
    }

    /// Kills a job that hangs, unless it is already being ended and has a deadline.
    pub(super) fn end_hung(&mut self, hang: Hang) {
        if hang.init_pid != self.job.namespace.init_pid()
            || self.exit_code.is_some()
            || self.ending.is_some()
            || self.hang.is_some()
        {
            return;
        }
        let stacks = hang
            .stacks
            .as_ref()
            .map(|at| format!(" The stacks of its threads here are in {}.", at.display()));
        tracing::error!("the job hangs: {}.{} It is ended", hang.what, stacks.unwrap_or_default());
        self.kill_job();
        self.hang = Some(hang);
    }

    /// The error of a job that was killed by [`Self::end_after_loss`].
    fn loss_error(&self, loss: &Loss) -> anyhow::Error {
        let next = match self.shared.good_snapshot() {
            Some(id) => {
                format!("The snapshot {id} is good: run the same command again to resume from it")
            }
            None => {
                "There is no snapshot of it yet: the same command starts it from the beginning".to_owned()
            }
        };
        anyhow!("the job was ended because its GPU state was lost ({loss}). {next}")
    }

    pub(super) fn job_ended(&mut self, code: i32) {
        self.exit_code = Some(code);
        self.ended_at = Some(SystemTime::now());
        self.look_for_loss(code);
        if let Some(cluster) = self.shared.nodes.filter(|_| self.awaits_nodes()) {
            cluster.part_ended(self.part_end(code));
            if code == 0 {
                tracing::info!(
                    "the part of the job here has ended with 0. The job is complete once the others have, and there are no more snapshots until then"
                );
            }
        }
        self.schedule(None);
        self.checkpoints.hurry();
        // While a dump ends the job, CRIU kills the processes, and must not be killed with them. Of a job that was killed,
        // nothing is left running.
        if self.ending.is_none() && !self.is_killed {
            self.end_leftovers();
        }
        self.look_for_loss(code);
        let sigterm_sent = self.ending.as_ref().is_some_and(|ending| ending.sigterm_sent);
        if code == 0 && !sigterm_sent {
            // A job that has succeeded needs no snapshot.
            self.checkpoints.cancel();
        } else if self.pending_checkpoints > 0 && self.ending.is_none() && !self.is_killed {
            tracing::info!("the job has ended with {code}; a checkpoint of it is not finished yet");
        }
    }

    /// A loss of GPU state may have ended the job before this session heard of it.
    fn look_for_loss(&mut self, code: i32) {
        if code != 0 && self.loss.is_none() {
            self.loss = self.losses.try_recv().ok();
        }
    }

    /// Ends the processes that the command has left running.
    fn end_leftovers(&self) {
        // One that has ended and that nobody has waited for has no memory.
        let left = || {
            let processes = self.job.namespace.survey().map(|survey| survey.processes).unwrap_or_default();
            let names = processes.into_iter().filter(|one| one.private_bytes > 0).map(|one| one.name);
            names.collect::<Vec<_>>()
        };
        let names = left();
        if names.is_empty() {
            return;
        }
        let count =
            if names.len() == 1 { "1 process".to_owned() } else { format!("{} processes", names.len()) };
        let named: Vec<_> = names.iter().take(LEFTOVERS_NAMED).map(|name| shown(name)).collect();
        tracing::info!(
            "the command has ended; what it left running is ended too: {count} ({})",
            named.join(", ")
        );
        let _ = self.job.namespace.signal(-1, false, SIGTERM);
        let deadline = Instant::now() + LEFTOVER_EXIT_TIMEOUT;
        while !left().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.release_gpus();
    }

    pub(super) fn finish(mut self) -> SessionEnd {
        let duration = self.begun.elapsed();
        let hung_since = self.hung_since();
        let is_good = |taken: &&SystemTime| hung_since.is_none_or(|since| **taken < since);
        let last = self.snapshot_times.iter().filter(is_good).max();
        let saved_after = last.map(|taken| taken.duration_since(self.begun_at).unwrap_or_default());
        let ended_at = *self.ended_at.get_or_insert_with(SystemTime::now);
        let ending = self.ending.take();
        let is_killed = ending.as_ref().is_some_and(|ending| ending.killed);
        let outcome = self.outcome(ending);
        self.record_outcome(&outcome, if is_killed { STORE_RETRY_TIMEOUT } else { OUTCOME_WRITE_TIMEOUT });
        // A cancelled checkpoint may still be writing.
        self.checkpoints.end(is_killed.then_some(CANCELLED_CHECKPOINT_TIMEOUT));
        if let Some(RunningJob { namespace, stdio, .. }) = Arc::into_inner(self.job) {
            drop(namespace);
            let tail = Arc::clone(stdio.tail());
            stdio.finish(match outcome {
                _ if is_killed => Duration::ZERO,
                SessionOutcome::Preempted { until, .. } => {
                    LAST_OUTPUT_TIMEOUT.min(until.saturating_duration_since(Instant::now()))
                }
                _ => LAST_OUTPUT_TIMEOUT,
            });
            record_output(self.shared, &tail);
        }
        stdio::messages_begin();
        SessionEnd { outcome, duration, saved_after, ended_at }
    }

    fn outcome(&self, ending: Option<Ending>) -> SessionOutcome {
        if let Some(end) = &self.nodes.end {
            self.answer_stop(end);
            return end.outcome();
        }
        let code = self.exit_code.unwrap_or(128 + SIGKILL);
        let is_recent = |at: Instant| at.elapsed() < USER_STOP_WINDOW;
        let is_closed = self.job.stdio.closed().is_some_and(is_recent);
        let stopped_by_user = self.user_stop.into_iter().chain(self.job.stdio.interrupted()).any(is_recent);
        if is_closed && code != 0 && !stopped_by_user && ending.is_none() {
            tracing::info!("the job ended after the reader of its output had closed it: it is not restarted");
        }
        let stopped_by_user = stopped_by_user || is_closed;
        match (ending, &self.loss) {
            // The job succeeded before its last snapshot was taken.
            (Some(ending), _) if code == 0 && !ending.sigterm_sent => {
                let problem = Some("the job came to its end".to_owned());
                ending.reply(&Reply::Stopped(Stopped { snapshot: None, problem }));
                SessionOutcome::Complete
            }
            (Some(ending), _) => self.preempted(ending),
            (None, _) if code == 0 => SessionOutcome::Complete,
            (None, Some(loss)) => {
                let what = format!("its GPU state was lost ({loss})");
                let error = Some(self.loss_error(loss));
                SessionOutcome::Failed { code: EXIT_OWN, what, error, hung_since: None }
            }
            (None, None) if let Some(hang) = &self.hang => SessionOutcome::hung(hang, code),
            (None, None) if stopped_by_user || code == 128 + SIGINT => SessionOutcome::StoppedByUser { code },
            (None, None) => {
                SessionOutcome::Failed { code, what: describe(code), error: None, hung_since: None }
            }
        }
    }

    fn preempted(&self, ending: Ending) -> SessionOutcome {
        let saved = ending.saved.as_ref().map(|saved| saved.id.clone());
        let reason = ending.problem.as_deref().unwrap_or("it ended by itself before");
        let again = "run the same command again to resume from it";
        let (what, remedy) = match (&saved, self.shared.good_snapshot()) {
            (Some(id), _) => (format!("the job was ended with the snapshot {id}"), again),
            (None, Some(id)) => (
                format!(
                    "the job was ended without a last snapshot: {reason}. The newest one is {id}; progress after it is lost"
                ),
                again,
            ),
            (None, None) => (
                format!("the job was ended without a snapshot: {reason}. It has none yet"),
                "run the same command again: it starts from the beginning",
            ),
        };
        match &saved {
            Some(_) => tracing::info!("{what}. To continue, {remedy}"),
            None => tracing::warn!("{what}. To continue, {remedy}"),
        }
        let entry = Entry::new(EventKind::Ended, what).remedy(Some(remedy)).snapshot(saved.as_ref());
        let problem = ending.problem.clone().filter(|_| saved.is_none());
        // A job that was killed leaves no time for anything else.
        let until = if ending.killed { Instant::now() } else { ending.deadline };
        ending.reply(&Reply::Stopped(Stopped { snapshot: saved, problem }));
        SessionOutcome::Preempted { entry: Box::new(entry), until, signalled: ending.signalled }
    }

    fn record_outcome(&self, outcome: &SessionOutcome, limit: Duration) {
        let outcome = match outcome {
            SessionOutcome::Complete => JobOutcome::Complete,
            SessionOutcome::Failed { code, .. } | SessionOutcome::StoppedByUser { code } => {
                JobOutcome::Failed { code: *code }
            }
            SessionOutcome::OverOnNodes(end) => JobOutcome::Failed { code: end.code },
            SessionOutcome::Preempted { .. } => JobOutcome::Failed { code: EXIT_PREEMPTED },
        };
        let ownership = Arc::clone(&self.shared.claimed.ownership);
        let retry_until = Instant::now() + OUTCOME_RETRY_TIMEOUT.min(limit);
        let record = move || loop {
            match ownership.change(|record| record.outcome = outcome) {
                Err(OwnershipError::Store(_)) if Instant::now() < retry_until => {
                    std::thread::sleep(OUTCOME_RETRY_INTERVAL);
                }
                recorded => return recorded,
            }
        };
        let error = match within(Instant::now() + limit, record) {
            Some(Ok(())) => return,
            Some(Err(OwnershipError::ClaimedElsewhere(claim))) => {
                return tracing::warn!("the end of the job is not noted: {claim}");
            }
            Some(Err(OwnershipError::Store(error))) => error.to_string(),
            None => "the store does not answer".to_owned(),
        };
        // The exit code reports the job's result; the next run takes this one for killed.
        tracing::error!(
            "the end of the job cannot be noted: {error}. If the job was complete, the next run needs --resume never"
        );
    }
}

/// Says how the job is ended, after an ending has begun because of `why`.
fn say_ending(why: &str, if_unsaved: IfUnsaved, is_signalled: bool, grace: Duration) {
    if if_unsaved == IfUnsaved::PassKeyOn {
        return tracing::info!(
            "{why}: the job is saved, and then ended. Another Ctrl-C ends it at once, and loses what it has done since its last snapshot"
        );
    }
    let limit = humantime::format_duration(grace);
    if if_unsaved == IfUnsaved::RunOn {
        return tracing::info!(
            "{why}: the job is ended once it is saved, and runs on if it cannot be saved. A signal limits the time for this to {limit} (--grace)"
        );
    }
    tracing::info!(
        "{why}: the job is ended with a snapshot, which has to be durable within {limit} (--grace). {} signal ends it at once",
        if is_signalled { "Another" } else { "A second" }
    );
}

/// An exit code in words.
fn describe(code: i32) -> String {
    match code {
        129.. if signal_hook::low_level::signal_name(code - 128).is_some() => {
            format!("it was killed by {} (exit code {code})", events::name(code - 128))
        }
        _ => format!("it ended with exit code {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_described_in_words() {
        assert_eq!(describe(3), "it ended with exit code 3");
        assert_eq!(describe(137), "it was killed by SIGKILL (exit code 137)");
        assert_eq!(describe(255), "it ended with exit code 255");
    }
}
