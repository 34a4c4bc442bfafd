//! The resume of one part of a job on several nodes: nothing runs, and no packet goes out, before all parts are restored.

use crate::cluster::PacketRule;
use crate::job::earlier_init;
use crate::namespace::Namespace;
use crate::restore::resume::{Failure, Resumed, Resumer};
use crate::sys::error::bad_input;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_cluster::{Outcome, Step};
use ckpt_snapshot::{Manifest, NodePart, ReadError, SnapshotId, Store, faults};
use std::net::UdpSocket;

impl Resumer<'_> {
    /// Resumes this node's part of a snapshot. Of an error, also says whether the snapshot is to blame.
    ///
    /// # Errors
    /// When it cannot be restored, or another node cannot restore its part.
    pub fn part(&self, id: &SnapshotId, hash: &str) -> Result<Resumed, (anyhow::Error, bool)> {
        let manifest = self.store.manifest(id).map_err(|error| {
            let blames_snapshot = matches!(error, ReadError::Damaged { .. } | ReadError::Missing(_));
            (error.into(), blames_snapshot)
        })?;
        if manifest.content_hash() != hash {
            let error = anyhow!("the part {id} here is not the one that the log of the job's nodes has");
            return Err((error, true));
        }
        self.resume(id).map_err(|failure| match failure {
            Failure::Damaged(error) => (error.into(), true),
            Failure::PortTaken(error)
            | Failure::GpuFull(error)
            | Failure::Lost(error)
            | Failure::Criu(error)
            | Failure::Refused(error)
            | Failure::Other(error) => (error, false),
        })
    }

    /// A part is resumed with the other parts only, and on a machine with its addresses.
    pub(super) fn check_part(&self, manifest: &Manifest) -> Result<()> {
        let (Some(part), Some(_)) = (&manifest.part, self.gate) else {
            if let Some(NodePart { node, nodes, .. }) = &manifest.part {
                bail!(bad_input(anyhow!(
                    "the snapshot {} is the part of node {node} of a job on {nodes} nodes: it can be resumed with --nodes {nodes} on all of them only",
                    manifest.id
                )));
            }
            return Ok(());
        };
        match self.job_network {
            Some(network) => network.keep(manifest)?,
            None if part.network.is_some() => bail!(bad_input(anyhow!(
                "the job began with --network job: use this option again, on all nodes"
            ))),
            None => {}
        }
        for address in &part.addresses {
            if let Err(error) = UdpSocket::bind((*address, 0)) {
                bail!(bad_input(anyhow!(
                    "the snapshot {} has connections from {address}, and this machine does not have that address ({error}): resume it on a machine with that address. A job that is begun with --network job has addresses that move with it",
                    manifest.id
                )));
            }
        }
        Ok(())
    }

    /// A namespace for the processes, with the names of machines that they know.
    pub(super) fn namespace(&self, manifest: &Manifest) -> Result<Namespace> {
        let namespace = Namespace::create(self.network, manifest.tree.private_dir.as_deref())?;
        earlier_init::record(self.dir, &namespace)?;
        if let Some(network) = self.job_network {
            namespace.set_names(network.names()?)?;
        }
        Ok(namespace)
    }

    /// Whether another try is possible: the other nodes do not count on this one yet, and wait.
    pub(super) fn may_retry(&self) -> bool {
        self.gate.is_none_or(|gate| gate.end().is_none() && !gate.has_done(Step::Load))
    }

    /// Puts the packet rule in place. Connections of an earlier session have ended before, on all nodes: behind the rule
    /// they cannot.
    pub(super) fn block_connections(&self, manifest: &Manifest) -> Result<()> {
        let (Some(gate), Some(part)) = (self.gate, &manifest.part) else { return Ok(()) };
        let rule = PacketRule::put(&part.ports.iter().copied().collect());
        let rule = rule.context("cannot block the job's connections")?;
        gate.keep_rule(rule).map_err(|why| anyhow!("the resume was given up: {why}"))
    }

    /// The part is restored, its tasks do not run yet. Waits until all nodes have come so far, and removes the packet rule.
    pub(super) fn cross_barriers(&self) -> Result<(), String> {
        let Some(gate) = self.gate else { return Ok(()) };
        faults::hit("part-restored").map_err(|error| error.to_string())?;
        gate.done(Step::Load, Outcome::Done);
        gate.release()
    }
}
