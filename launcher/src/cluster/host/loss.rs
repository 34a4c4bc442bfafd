//! A launcher is lost, with its machine or without: the job ends on all nodes. Either the launchers that are left end too, or
//! they start again and wait until all nodes are there, a spare in the place of the lost one.

use super::Host;
use crate::cluster::join::{mismatch, refuse};
use crate::cluster::links::Joining;
use crate::cluster::messages::{End, Message};
use crate::cluster::options::OnNodeLoss;
use crate::sys::error::EXIT_OWN;
use std::sync::atomic::Ordering;

/// Connections of spares that come while the job runs have numbers from here on.
const FIRST_NUMBER: u64 = 1 << 32;

impl Host {
    /// A node is lost. A node that has lost node 0 does not know of spares.
    pub(super) fn end_after_loss(&mut self, why: String) {
        let is_to_rejoin = match self.on_loss {
            // It was to end anyway.
            _ if self.aftermath.is_to_stop.load(Ordering::SeqCst) => false,
            OnNodeLoss::Exit => false,
            OnNodeLoss::Wait => true,
            // Before the first snapshot, no spare can take a place.
            OnNodeLoss::Auto => self.is_coordinator() && self.spares.number() > 0 && self.usable > 0,
        };
        self.end(End { is_to_rejoin, ..End::failure(why, EXIT_OWN) });
    }

    /// Somebody wants to join while the job runs.
    pub(super) fn admit_spare(&mut self, joining: Joining) {
        let mismatch = mismatch(&self.own, &joining.join);
        // A node that is there already becomes a spare, if any machine can take any node.
        let may_be_spare = self.own.network_range.is_some()
            && self.on_loss != OnNodeLoss::Exit
            && self.usable > 0
            && mismatch.is_none();
        if joining.join.rank >= self.settings.nodes || may_be_spare {
            if let Some(why) = mismatch {
                return refuse(joining, why);
            }
            self.admitted += 1;
            return self.spares.add(joining, (FIRST_NUMBER + self.admitted, true), &self.inputs);
        }
        let (mut sender, _) = joining.connection;
        let why = "an earlier launcher of node 0 is still there".to_owned();
        let _ = sender.send(&Message::Refused { why, is_transient: true });
        sender.close();
    }
}
