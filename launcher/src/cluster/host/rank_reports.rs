//! How far the ranks of NCCL are on each node. Node 0 compares them to find those that let others wait.

use super::{Cluster, Host, Input};
use crate::cluster::messages::RankReport;
use crate::sys::deadline::RANK_REPORT_LIFE;
use crossbeam_channel::Sender;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What other nodes have reported last, and when that was received.
#[derive(Debug, Default)]
pub(super) struct Reported(Mutex<BTreeMap<u32, (Instant, Vec<RankReport>)>>);

/// The reports of all nodes, as the watchdog of one sees them.
#[derive(Clone, Debug)]
pub struct RankReports {
    node: u32,
    inputs: Sender<Input>,
    reported: Arc<Reported>,
}

impl Cluster {
    /// The reports of all nodes.
    #[must_use]
    pub fn rank_reports(&self) -> RankReports {
        let (inputs, reported) = (self.inputs.clone(), Arc::clone(&self.reported));
        RankReports { node: self.me.rank, inputs, reported }
    }
}

impl RankReports {
    /// This node.
    #[must_use]
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Whether this node compares the ranks of all nodes.
    #[must_use]
    pub fn compares(&self) -> bool {
        self.node == 0
    }

    /// Tells node 0 how far the ranks here are.
    pub fn tell(&self, ranks: Vec<RankReport>) {
        // The thread has ended with the job.
        let _ = self.inputs.send(Input::RankReports(ranks));
    }

    /// At node 0: the ranks on other nodes that have reported lately, with their nodes.
    #[must_use]
    pub fn of_others(&self) -> Vec<(u32, RankReport)> {
        let mut reported = self.reported.0.lock();
        reported.retain(|_, (at, _)| at.elapsed() < RANK_REPORT_LIFE);
        let ranks =
            reported.iter().flat_map(|(node, (_, ranks))| ranks.iter().map(|rank| (*node, rank.clone())));
        ranks.collect()
    }
}

impl Host {
    /// A node has reported.
    pub(super) fn rank_reports(&self, node: u32, ranks: Vec<RankReport>) {
        self.reported.0.lock().insert(node, (Instant::now(), ranks));
    }
}
