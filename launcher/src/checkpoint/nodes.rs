//! A checkpoint of one part of a job on several nodes: the same attempt as on one machine, with barriers.
//!
//! ```text
//!   Prepare   survey, space, staging                  ─┐ the job runs
//!   Quiesce   all ranks of NCCL stop at the same step  │
//!   Freeze    the packet rule                          │
//!   Dump      CRIU freezes and captures the tasks      │ barriers of all nodes between these
//!   Unblock   the packet rule is removed               │
//!   Thaw      CRIU lets the tasks run                  │
//!   Store     the part is stored
//!   Prove     connections to other nodes move on; then the part waits until the global manifest is committed
//! ```

use crate::agents::JobLead;
use crate::checkpoint::attempt::{Attempt, AttemptError};
use crate::checkpoint::dump::Frozen;
use crate::cluster::sockets::{LauncherConnections, TcpSocket};
use crate::cluster::{Gate, GateEnd, JobNetwork, PacketRule, progress, sockets};
use crate::criu::SessionError;
use crate::job::status::unix_ms;
use crate::store::tiers;
use crate::sys::deadline::{NODE_CLOSING_PATIENCE, NODE_CLOSING_POLL_INTERVAL};
use ckpt_cluster::{Outcome, Step};
use ckpt_cut::FromLauncher;
use ckpt_snapshot::{Manifest, NodePart, PartNetwork, SnapshotId, Store, faults};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

/// Which part of the job this launcher has.
#[derive(Clone, Debug)]
pub struct PartPlace {
    /// The name of the log.
    pub log: String,
    /// This node.
    pub node: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// What it sees of the network of the job's own.
    pub network: Option<PartNetwork>,
    /// The connections to the other launchers.
    pub launchers: LauncherConnections,
}

/// What the attempt of a part works with.
#[derive(Clone)]
pub struct PartAttempt {
    /// Its steps.
    pub gate: Arc<Gate>,
    /// Which part it is.
    pub place: PartPlace,
}

impl PartAttempt {
    fn gate_error(why: String) -> AttemptError {
        AttemptError::Nodes(why)
    }
}

impl Attempt<'_> {
    /// The vote: everything is ready. Waits until all nodes are.
    pub(super) fn vote(&self) -> Result<(), AttemptError> {
        let Some(PartAttempt { gate, .. }) = &self.part else { return Ok(()) };
        faults::hit("vote").map_err(AttemptError::Staging)?;
        if let Some(progress) = self.parts.status.own_progress_unix_ms() {
            gate.is_idle_for(unix_ms(SystemTime::now()).saturating_sub(progress));
        }
        gate.done(Step::Prepare, Outcome::Done);
        gate.wait(Step::Quiesce).map_err(PartAttempt::gate_error)?;
        if self.parts.job.agents.is_none() {
            gate.tell(FromLauncher::Begin { ranks: None });
            self.has_quiesced()?;
        }
        Ok(())
    }

    /// The way to the coordinator of the cut of all nodes.
    pub(super) fn lead(&self) -> Option<Arc<dyn JobLead>> {
        self.part.as_ref().map(|part| Arc::clone(&part.gate) as Arc<dyn JobLead>)
    }

    /// All ranks of this node stand at the cut of all. Waits until all nodes have come so far.
    pub(super) fn has_quiesced(&self) -> Result<(), AttemptError> {
        let Some(PartAttempt { gate, .. }) = &self.part else { return Ok(()) };
        gate.done(Step::Quiesce, Outcome::Done);
        gate.wait(Step::Freeze).map_err(PartAttempt::gate_error)
    }

    /// Puts the packet rule in place, and waits until all nodes have done so. A second try of the dump has it already.
    pub(super) fn block_connections(&self) -> Result<(), SessionError> {
        let Some(PartAttempt { gate, .. }) = &self.part else { return Ok(()) };
        if gate.has_done(Step::Freeze) {
            return Ok(());
        }
        let pids =
            self.parts.job.namespace.survey().map_err(|error| SessionError::Stage(error.to_string()))?.pids;
        let own = sockets::of_processes(&self.proc(), &pids)?;
        gate.watch(progress::moving(sockets::connections(&own)));
        let rule = PacketRule::put(&sockets::ports(&own))
            .map_err(|error| SessionError::Stage(format!("cannot block the job's connections: {error}")))?;
        gate.keep_rule(rule).map_err(SessionError::Stage)?;
        gate.done(Step::Freeze, Outcome::Done);
        gate.wait(Step::Dump).map_err(SessionError::Stage)
    }

    /// The tasks are captured, and frozen. Waits until all nodes have come so far, and removes the packet rule.
    pub(super) fn cross_barriers(&self, frozen: &mut Frozen) -> Result<(), String> {
        let Some(PartAttempt { gate, place }) = &self.part else { return Ok(()) };
        // An error if it was given up meanwhile.
        gate.wait(Step::Dump)?;
        if let Some(port) = frozen.tcp_ports.iter().find(|port| !gate.blocks(**port)) {
            return Err(format!("the job has opened a connection meanwhile (port {port})"));
        }
        let unsettled = unsettled(gate, &place.launchers)
            .map_err(|error| format!("cannot list the machine's connections: {error}"))?;
        if let Some(socket) = unsettled {
            return Err(format!(
                "a connection to {}, port {}, was being opened or closed",
                socket.remote, socket.remote_port
            ));
        }
        let own = sockets::of_processes(&self.proc(), &frozen.survey.pids)
            .map_err(|error| format!("cannot list the job's connections: {error}"))?;
        let beyond = own.iter().filter(|socket| socket.is_beyond_loopback() && socket.is_connected());
        frozen.addresses =
            beyond.map(|socket| socket.local.to_canonical()).collect::<BTreeSet<_>>().into_iter().collect();
        gate.done(Step::Dump, Outcome::Done);
        gate.release()
    }

    /// Whether there is no second try of the dump: the other nodes count on what was captured; or agents would have to be
    /// called back, and the ranks of this node be brought to another cut than those of the others.
    pub(super) fn has_one_try(&self) -> bool {
        let has_agents = self.parts.job.agents.is_some();
        self.part.as_ref().is_some_and(|part| has_agents || part.gate.has_done(Step::Dump))
    }

    /// The error of an attempt that another node, or the time, has ended.
    pub(super) fn given_up(&self) -> Option<AttemptError> {
        match self.part.as_ref()?.gate.end()? {
            GateEnd::Aborted(why) | GateEnd::Unknown(why) => Some(AttemptError::Nodes(why)),
            GateEnd::Committed { .. } => None,
        }
    }

    /// The tasks run again. Waits until the part is to be stored.
    pub(super) fn has_thawed(&self) -> Result<(), AttemptError> {
        let Some(PartAttempt { gate, .. }) = &self.part else { return Ok(()) };
        gate.done(Step::Thaw, Outcome::Done);
        gate.wait(Step::Store).map_err(PartAttempt::gate_error)
    }

    /// What the manifest says of the part.
    pub(super) fn part_record(&self, frozen: &Frozen) -> Option<NodePart> {
        let PartAttempt { gate, place } = self.part.as_ref()?;
        let attempt = gate.attempt();
        if let Some(network) = &place.network {
            JobNetwork::warn_of_others(network, &frozen.addresses);
        }
        Some(NodePart {
            log: place.log.clone(),
            epoch: attempt.epoch,
            attempt: attempt.number,
            node: place.node,
            nodes: place.nodes,
            addresses: frozen.addresses.clone(),
            ports: frozen.tcp_ports.iter().copied().collect(),
            network: place.network.clone(),
        })
    }

    /// The part is stored. Waits for the global manifest; without it, the part is worth nothing and is removed.
    pub(super) fn await_commit(&self, manifest: &Manifest, in_memory: bool) -> Result<(), AttemptError> {
        let Some(PartAttempt { gate, .. }) = &self.part else { return Ok(()) };
        // A snapshot in memory that counts survives the loss of any machine.
        if let Some(persister) = self.parts.persister.as_ref().filter(|_| in_memory) {
            let is_over = Arc::new(AtomicBool::new(false));
            let (cancel, its) = (Arc::clone(&is_over), Arc::clone(persister));
            let interrupt = move || {
                cancel.store(true, Ordering::Relaxed);
                its.interrupt_replica();
            };
            gate.interruptible(Box::new(interrupt), || persister.replicate(&manifest.id, &is_over));
        }
        // As a resume reads it.
        let hash = self.parts.store.manifest(&manifest.id)?.content_hash();
        gate.done(Step::Store, Outcome::Stored { hash });
        gate.prove();
        match gate.wait_end() {
            GateEnd::Committed { idle_ms } => {
                // What is kept from before a hang is then the same on all nodes.
                if let Some(idle_ms) = idle_ms {
                    let now_unix_ms = unix_ms(SystemTime::now());
                    self.parts.status.progressed_elsewhere(now_unix_ms.saturating_sub(idle_ms));
                }
                Ok(())
            }
            GateEnd::Aborted(why) => {
                self.remove_part(&manifest.id);
                Err(PartAttempt::gate_error(why))
            }
            // The next start learns from the log whether it counts.
            GateEnd::Unknown(why) => Err(PartAttempt::gate_error(why)),
        }
    }

    fn remove_part(&self, id: &SnapshotId) {
        self.parts.persister.iter().for_each(|persister| persister.is_worthless(id));
        if let Err(error) = tiers::remove_part(&self.parts.store, &self.parts.dir, id) {
            tracing::warn!("the part {id}, which has no global manifest, cannot be removed: {error:#}");
        }
    }
}

/// A connection that is in no snapshot, although it may carry data of the job to another node: no process has it, and the
/// kernel still works on it. One with another port than those of the packet rule was closed before the rule was made, and the
/// process at the other end, whose packets are dropped, has not got all of it; or it is of another program, and soon over.
fn unsettled(gate: &Gate, launchers: &LauncherConnections) -> std::io::Result<Option<TcpSocket>> {
    let patience = Instant::now() + NODE_CLOSING_PATIENCE;
    loop {
        let all = sockets::all()?;
        let mut beyond =
            all.into_iter().filter(|socket| socket.is_unsettled() && socket.is_beyond_loopback());
        let found = beyond.find(|socket| {
            gate.blocks(socket.port)
                || socket.is_closing() && !launchers.has(socket) && gate.is_node(socket.remote)
        });
        match found {
            Some(socket) if !gate.blocks(socket.port) && Instant::now() < patience => {
                std::thread::sleep(NODE_CLOSING_POLL_INTERVAL);
            }
            found => return Ok(found),
        }
    }
}
