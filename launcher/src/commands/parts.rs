//! Parts of jobs on several nodes: what a command can know of the other nodes.

use crate::cli::config::Config;
use crate::cluster::{GlobalManifests, NODE};
use crate::store::root::Root;
use crate::store::tiers;
use anyhow::Result;
use ckpt_snapshot::{JobDir, NodePart, SnapshotId, Store};
use std::collections::BTreeSet;

/// Those of `candidates`, oldest first, which are snapshots of a job in this store, from which the job can be resumed on all its
/// nodes once the `deleted` ones are gone, as far as this store tells. All of them, if the job is on one machine.
///
/// A snapshot does not count without a global manifest, nor if another node whose parts are in this store lacks its part. Where
/// the log is in another store, the newest one may have no global manifest, and counts only if there are no others.
///
/// # Errors
/// When the store cannot be read.
pub fn resumable(
    config: &Config,
    job: &JobDir,
    mut candidates: Vec<SnapshotId>,
    deleted: &[(JobDir, SnapshotId)],
) -> Result<Vec<SnapshotId>> {
    let Some((name, _)) = job.key().as_str().rsplit_once(NODE) else { return Ok(candidates) };
    let number_of = |other: &JobDir| -> Option<u32> {
        let (of, number) = other.key().as_str().rsplit_once(NODE)?;
        number.parse().ok().filter(|_| of == name)
    };
    let all = Root::open(&config.store)?.jobs()?;
    let nodes: Vec<_> = all.iter().filter_map(|other| Some((number_of(other)?, other))).collect();
    let node_0 = nodes.iter().find(|(number, _)| *number == 0).map(|(_, node)| *node);
    let mut global = node_0.map(GlobalManifests::of);
    let mut held = Vec::new();
    for (number, other) in nodes.iter().filter(|(_, other)| other.key() != job.key()) {
        let is_deleted =
            |id: &SnapshotId| deleted.iter().any(|(of, deleted)| of.key() == other.key() && deleted == id);
        let store = tiers::open(&config.store, other)?;
        let ids = tiers::list_local(&store)?.into_iter().map(|listed| listed.id).filter(|id| !is_deleted(id));
        let parts = ids.filter_map(|id| store.manifest(&id).ok()?.part);
        held.push((*number, parts.map(|part| snapshot_of(&part)).collect::<BTreeSet<_>>()));
    }
    let (store, mut are_parts) = (tiers::open(&config.store, job)?, false);
    candidates.retain(|id| {
        // A job on one machine may have such a name.
        let Some(part) = store.manifest(id).ok().and_then(|manifest| manifest.part) else { return true };
        are_parts = true;
        let is_committed = global.as_mut().and_then(|global| global.has(&part));
        // The job may have had more nodes once.
        let mut nodes = held.iter().filter(|(number, _)| *number < part.nodes);
        is_committed != Some(false) && nodes.all(|(_, parts)| parts.contains(&snapshot_of(&part)))
    });
    if are_parts && node_0.is_none() && candidates.len() > 1 {
        candidates.pop();
    }
    Ok(candidates)
}

/// The snapshot of which this is a part.
fn snapshot_of(part: &NodePart) -> (String, u64, u64) {
    (part.log.clone(), part.epoch, part.attempt)
}
