//! A session of one part of a job on several nodes: node 0 decides when snapshots are taken, and the session ends when that
//! of all nodes does.

use super::{JobSession, repeats};
use crate::checkpoint::nodes::PartAttempt;
use crate::cluster::{Cluster, End, EndedPart, IdlePart, Notice, StopHow};
use crate::observe::control_server::Answer;
use crate::supervise::events::{self, Hang, StopCall};
use crate::supervise::nodes::{NodesEnd, place};
use crate::supervise::stacks;
use crate::sys::deadline::CHECKPOINT_FIRST_RETRY;
use crate::sys::error::EXIT_OWN;
use ckpt_cluster::Blame;
use ckpt_protocol::control::{Reply, Stopped};
use signal_hook::consts::SIGTERM;
use std::time::{Instant, SystemTime};

/// What the session knows of the other nodes.
#[derive(Default)]
pub(super) struct Nodes {
    /// Callers that wait for a snapshot that has not begun.
    waiting: Vec<Answer>,
    /// Callers that wait for the one that has.
    served: Vec<Answer>,
    /// Callers of `ckpt-run stop`.
    stopping: Vec<Answer>,
    /// How the job has ended on all nodes.
    pub(super) end: Option<NodesEnd>,
}

impl JobSession<'_> {
    /// Whether this launcher decides when snapshots are taken.
    pub(super) fn decides(&self) -> bool {
        self.shared.nodes.is_none_or(|cluster| cluster.rank() == 0)
    }

    /// Whether the other nodes still run.
    pub(super) fn awaits_nodes(&self) -> bool {
        self.shared.nodes.is_some() && self.nodes.end.is_none()
    }

    /// Requests a snapshot of all nodes.
    pub(super) fn request_of_all(&mut self, cluster: &Cluster, answer: Option<Answer>) {
        let is_durable = answer.is_some();
        self.nodes.waiting.extend(answer);
        self.schedule(None);
        cluster.request(is_durable);
    }

    /// Ends the job on all nodes, with a last snapshot of all.
    pub(super) fn stop_all(&mut self, cluster: &Cluster, why: &str, call: Option<StopCall>) {
        let how = match &call {
            Some(call) if !call.force => StopHow::Save,
            _ => StopHow::Preempt,
        };
        self.nodes.stopping.extend(call.map(|call| call.answer));
        cluster.stop(why.to_owned(), how);
    }

    /// The launcher of this node has received a signal that ends the job.
    pub(super) fn signal_to_all(&mut self, cluster: &Cluster, signal: i32) {
        let name = events::name(signal);
        match self.ending_signal {
            Some(before) if repeats(before, signal) => tracing::debug!("{name} has come again"),
            Some(_) => cluster.stop(format!("its launcher received a second signal ({name})"), StopHow::Now),
            None => {
                self.ending_signal = Some((signal, Instant::now()));
                cluster.stop(format!("its launcher received {name}"), StopHow::Preempt);
            }
        }
    }

    /// Answers those who have stopped the job: it has ended on all nodes.
    pub(super) fn answer_stop(&self, end: &NodesEnd) {
        let last = self.shared.status.snapshot().last_snapshot.map(|saved| saved.id);
        let (snapshot, problem) = match end {
            NodesEnd::Complete => (None, Some("the job came to its end".to_owned())),
            NodesEnd::End(End { is_saved: true, .. }) => (last, None),
            NodesEnd::End(end) | NodesEnd::Over(end) => (None, Some(end.why.clone())),
        };
        for answer in &self.nodes.stopping {
            let stopped = Stopped { snapshot: snapshot.clone(), problem: problem.clone() };
            let _ = answer.send(Reply::Stopped(stopped));
        }
    }

    /// An attempt of this part is over.
    pub(super) fn attempt_ended(&mut self, reply: &Reply) {
        for answer in self.nodes.served.drain(..) {
            let _ = answer.send(reply.clone());
        }
        if let (Some(cluster), false) = (self.shared.nodes, self.nodes.waiting.is_empty()) {
            cluster.request(true);
        }
    }

    fn refuse_waiting(&mut self, why: &str) {
        for answer in self.nodes.waiting.drain(..) {
            let _ = answer.send(Reply::Error(why.to_owned()));
        }
    }

    pub(super) fn node_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Checkpoint(gate) => {
                let Some(cluster) = self.shared.nodes.filter(|_| self.exit_code.is_none()) else {
                    let why = "its part of the job has ended";
                    self.refuse_waiting(why);
                    return gate.fail(why, Blame::Node);
                };
                // Who waits for one in the store gets the next one.
                if gate.is_durable() {
                    self.nodes.served.append(&mut self.nodes.waiting);
                }
                self.pending_checkpoints += 1;
                self.schedule(None);
                self.checkpoints.request_part(PartAttempt { gate, place: place(cluster) });
            }
            Notice::NotTaken(why) if self.pending_checkpoints == 0 => {
                self.refuse_waiting(&why);
                self.schedule(Some(CHECKPOINT_FIRST_RETRY));
            }
            // The attempt here reports it.
            Notice::NotTaken(_) => {}
            Notice::Stopping => {
                self.checkpoints.hurry_part();
                self.shared.opened.pace.hurry();
            }
            Notice::RunsOn(why) => {
                self.relax();
                let text =
                    format!("the job runs on: {why}. `ckpt-run stop --force` ends it without a snapshot");
                for answer in self.nodes.stopping.drain(..) {
                    let _ = answer.send(Reply::Error(text.clone()));
                }
            }
            Notice::Terminate(why) => self.terminate(&why),
            Notice::Running => tracing::info!("the job runs on all its nodes"),
            Notice::Load(load) => load.gate.fail("its part of the job runs", Blame::Node),
            Notice::Complete => self.nodes.end = Some(NodesEnd::Complete),
            Notice::Over(end) => self.end_part(NodesEnd::Over(end)),
            Notice::End(end) => self.end_part(NodesEnd::End(end)),
            // For a job that does not run.
            Notice::Restarting(_) => {}
        }
    }

    /// The job is to end, and cannot be saved.
    fn terminate(&self, why: &str) {
        if self.exit_code.is_some() {
            return;
        }
        tracing::warn!(
            "the job cannot be saved: {why}. Its part here gets SIGTERM, and has the rest of --grace to end by itself"
        );
        self.forward_signal(SIGTERM);
    }

    /// The part here has done nothing for `--hang-timeout`.
    pub(super) fn part_is_idle(&self, hang: &Hang) {
        if hang.init_pid != self.job.namespace.init_pid() || self.exit_code.is_some() {
            return;
        }
        tracing::warn!(
            "{}. The job is restarted if its parts on the other nodes do nothing either",
            hang.what
        );
        if let Some(cluster) = self.shared.nodes {
            cluster.is_idle(Some(IdlePart { what: hang.describe(), idle_ms: ms_since(hang) }));
        }
    }

    /// It works again.
    pub(super) fn part_works(&self, init_pid: i32) {
        if init_pid != self.job.namespace.init_pid() {
            return;
        }
        tracing::info!("the part of the job here works again");
        if let Some(cluster) = self.shared.nodes {
            cluster.is_idle(None);
        }
    }

    /// How the part here has ended.
    pub(super) fn part_end(&self, code: i32) -> EndedPart {
        if let Some(loss) = &self.loss {
            let why = format!("its part of the job was ended because its GPU state was lost ({loss})");
            return EndedPart { code: EXIT_OWN, why: Some(why), hung_ms: None };
        }
        let Some(hang) = &self.hang else { return EndedPart::own(code) };
        let why = format!("its part of the job hung: {}", hang.describe());
        EndedPart { code, why: Some(why), hung_ms: Some(ms_since(hang)) }
    }

    /// Since when the job hangs, here or on another node. Later snapshots contain the hang.
    pub(super) fn hung_since(&self) -> Option<SystemTime> {
        let of_all = match &self.nodes.end {
            Some(NodesEnd::Over(end)) => end.hung_since(),
            _ => None,
        };
        self.hang.as_ref().map(|hang| hang.since).into_iter().chain(of_all).min()
    }

    fn end_part(&mut self, end: NodesEnd) {
        if let NodesEnd::Over(End { hung_since_unix_ms: Some(_), why, .. }) = &end
            && self.exit_code.is_none()
            && self.hang.is_none()
        {
            // What hangs may be here, or wait for that.
            match stacks::keep(&self.shared.opened.dir, self.job.tree(), why) {
                Ok(at) => tracing::warn!("the stacks of the part of the job here are in {}", at.display()),
                Err(error) => tracing::warn!("cannot save the stacks of the part of the job here: {error:#}"),
            }
        }
        self.nodes.end = Some(end);
        self.checkpoints.cancel();
        self.kill_job();
    }
}

/// For how long nothing has been done, in milliseconds.
fn ms_since(hang: &Hang) -> u64 {
    let elapsed = hang.since.elapsed().unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
