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
    let is_node = |other: &JobDir| other.key().as_str().rsplit_once(NODE).is_some_and(|(of, _)| of == name);
    let nodes: Vec<_> = Root::open(&config.store)?.jobs()?.into_iter().filter(is_node).collect();
    let node_0 = nodes.iter().find(|node| node.key().as_str() == format!("{name}{NODE}0"));
    let mut global = node_0.map(GlobalManifests::of);
    let mut held = Vec::new();
    for other in nodes.iter().filter(|other| other.key() != job.key()) {
        let is_deleted =
            |id: &SnapshotId| deleted.iter().any(|(of, deleted)| of.key() == other.key() && deleted == id);
        let store = tiers::open(&config.store, other)?;
        let ids = tiers::list_local(&store)?.into_iter().map(|listed| listed.id).filter(|id| !is_deleted(id));
        let parts = ids.filter_map(|id| store.manifest(&id).ok()?.part);
        held.push(parts.map(|part| snapshot_of(&part)).collect::<BTreeSet<_>>());
    }
    let store = tiers::open(&config.store, job)?;
    candidates.retain(|id| {
        let Some(part) = store.manifest(id).ok().and_then(|manifest| manifest.part) else { return false };
        let is_committed = global.as_mut().and_then(|global| global.has(&part));
        is_committed != Some(false) && held.iter().all(|parts| parts.contains(&snapshot_of(&part)))
    });
    if node_0.is_none() && candidates.len() > 1 {
        candidates.pop();
    }
    Ok(candidates)
}

/// The snapshot of which this is a part.
fn snapshot_of(part: &NodePart) -> (String, u64, u64) {
    (part.log.clone(), part.epoch, part.attempt)
}
