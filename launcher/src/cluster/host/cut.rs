//! Node 0: the cut of the ranks of all nodes, in the step Quiesce (`docs/design/collectives.md`).

use super::{Host, Message};
use crate::agents::CUT_SETTINGS;
use ckpt_cluster::AttemptId;
use ckpt_cut::{FromLauncher, JobCut};
use std::time::Duration;

/// The coordinator of the ranks of all nodes.
pub(super) struct RanksOfAll {
    cut: JobCut,
    /// The newest checkpoint of which a node has said something.
    attempt: Option<AttemptId>,
}

impl RanksOfAll {
    pub(super) fn new(nodes: u32) -> Self {
        Self { cut: JobCut::new(CUT_SETTINGS, nodes), attempt: None }
    }

    pub(super) fn next_tick(&self) -> Option<Duration> {
        self.cut.next_tick()
    }

    /// The checkpoint, or the session, is over. The nodes learn this otherwise, and release their ranks.
    pub(super) fn end(&mut self) {
        self.cut.end();
    }
}

impl Host {
    /// A node says something of its ranks.
    pub(super) fn ranks_say(&mut self, node: u32, attempt: AttemptId, message: FromLauncher) {
        let ranks = &mut self.ranks;
        if ranks.attempt.is_none_or(|newest| newest < attempt) {
            ranks.attempt = Some(attempt);
            ranks.cut.begin();
        }
        if ranks.attempt == Some(attempt) {
            ranks.cut.receive(self.begun.elapsed(), node, message);
            self.tell_ranks();
        }
    }

    pub(super) fn tick_cut(&mut self) {
        let now = self.now();
        if self.ranks.next_tick().is_some_and(|next| next <= now) {
            self.ranks.cut.tick(now);
            self.tell_ranks();
        }
    }

    fn tell_ranks(&mut self) {
        let Some(attempt) = self.ranks.attempt else { return };
        for (node, message) in self.ranks.cut.take_messages() {
            let message = Message::Cut { attempt, message };
            match self.links.get(&node) {
                Some(link) => link.send(message),
                None if node == self.me.rank => self.receive(node, message),
                None => {}
            }
        }
    }
}
