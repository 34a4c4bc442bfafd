//! A session of one part of a job on several nodes: node 0 decides when snapshots are taken, and the session ends when that
//! of all nodes does.

use super::JobSession;
use crate::checkpoint::nodes::PartAttempt;
use crate::cluster::{Cluster, Notice};
use crate::observe::control_server::Answer;
use crate::supervise::nodes::{NodesEnd, place};
use crate::sys::deadline::CHECKPOINT_FIRST_RETRY;
use ckpt_protocol::control::Reply;

/// What the session knows of the other nodes.
#[derive(Default)]
pub(super) struct Nodes {
    /// Callers that wait for a snapshot that has not begun.
    waiting: Vec<Answer>,
    /// Callers that wait for the one that has.
    served: Vec<Answer>,
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
        if cluster.rank() != 0 {
            let text =
                "snapshots of all nodes are taken by node 0: call `ckpt-run checkpoint` there".to_owned();
            let _ = answer.map(|answer| answer.send(Reply::Error(text)));
            return;
        }
        self.nodes.waiting.extend(answer);
        self.schedule(None);
        cluster.request();
    }

    /// An attempt of this part is over.
    pub(super) fn attempt_ended(&mut self, reply: &Reply) {
        for answer in self.nodes.served.drain(..) {
            let _ = answer.send(reply.clone());
        }
        if let (Some(cluster), false) = (self.shared.nodes, self.nodes.waiting.is_empty()) {
            cluster.request();
        }
    }

    pub(super) fn node_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Checkpoint(gate) => {
                let Some(cluster) = self.shared.nodes.filter(|_| self.exit_code.is_none()) else {
                    return gate.fail("its part of the job has ended", false);
                };
                self.nodes.served.append(&mut self.nodes.waiting);
                self.pending_checkpoints += 1;
                self.schedule(None);
                self.checkpoints.request_part(PartAttempt { gate, place: place(cluster) });
            }
            Notice::NotTaken(why) if self.pending_checkpoints == 0 => {
                for answer in self.nodes.waiting.drain(..) {
                    let _ = answer.send(Reply::Error(why.clone()));
                }
                self.schedule(Some(CHECKPOINT_FIRST_RETRY));
            }
            // The attempt here reports it.
            Notice::NotTaken(_) => {}
            Notice::Running => tracing::info!("the job runs on all its nodes"),
            Notice::Load(load) => load.gate.fail("its part of the job runs", false),
            Notice::Complete => self.nodes.end = Some(NodesEnd::Complete),
            Notice::End(end) => {
                self.nodes.end = Some(NodesEnd::End(end));
                self.checkpoints.cancel();
                self.kill_job();
            }
        }
    }
}
