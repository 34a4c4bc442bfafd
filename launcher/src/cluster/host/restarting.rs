//! A job that is restarted on all nodes after a part of it has failed, while all launchers are there.
//!
//! ```text
//!             a part, or a resume, has failed           the supervisor of node 0: again
//!   running ─────────────────────────────────► waiting ─────────────────────────────────► resuming
//!                                                 └──── not again, or the job is stopped ──► End
//! ```

use super::{Host, Notice, Resumable};
use crate::cluster::messages::{End, Message, Restart};
use ckpt_cluster::AttemptId;
use std::collections::BTreeSet;

impl Host {
    /// The session is over on all nodes. The supervisor of node 0 decides whether another one follows.
    pub(super) fn over(&mut self, rank: u32, end: End) {
        match &self.stopping {
            // The others may save what they have.
            Some(stopping) if stopping.is_preemption() && !self.is_resuming => {
                return self.not_saved(&end.why);
            }
            Some(_) => return self.end(end),
            None => {}
        }
        self.close_gate(&end.why);
        self.ranks.end();
        self.tell_all(&Message::Over(end.clone()));
        self.forget_parts();
        self.is_waiting = true;
        self.peer.part_ended(self.now());
        self.peer.end_session(self.now(), rank);
        let _ = self.notices.send(Notice::Over(end));
    }

    /// The part of a session that is over is ended here.
    pub(super) fn session_ended(&mut self, ports: BTreeSet<u16>) {
        self.has_session = false;
        self.ports.extend(ports);
        self.settling.take().into_iter().for_each(|attempt| self.settle(attempt));
    }

    /// A resume begins: waits for the end of the part of the earlier session.
    pub(super) fn end_earlier(&mut self, attempt: AttemptId) {
        if self.has_session {
            self.settling = Some(attempt);
        } else {
            self.settle(attempt);
        }
    }

    /// Node 0 is about to restart the job.
    pub(super) fn announce(&self, restart: Restart) {
        self.tell_all(&Message::Restarting(restart.clone()));
        let _ = self.notices.send(Notice::Restarting(restart));
    }

    /// Node 0 restarts it.
    pub(super) fn resume(&mut self, Resumable { held, mut excluded }: Resumable) {
        (self.is_waiting, self.is_resuming) = (false, true);
        // What is in the stores may have been left behind.
        self.since_durable = None;
        // Others were pruned: the log keeps their records.
        let is_gone = |attempt: &AttemptId| held.as_ref().is_some_and(|held| !held.contains(attempt));
        excluded.extend(self.peer.snapshots().into_iter().filter(is_gone));
        self.usable = self.usable.saturating_sub(self.peer.exclude(excluded));
        self.peer.resume(self.now());
    }
}
