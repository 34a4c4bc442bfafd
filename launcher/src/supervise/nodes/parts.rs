//! The parts of snapshots that this node can resume, and which of them it does.

use super::{COULD_NOT_RESUME, blame, next_load};
use crate::cluster::{self, Cluster, End, HeldPart, Load};
use crate::job::resume_point::Resume;
use crate::report::failure::in_one_line;
use crate::store::tiers::{self, REPLICA};
use crate::supervise::startup::OpenedJob;
use crate::sys::deadline::{REPLICA_PATIENCE, REPLICA_RETRY_INTERVAL};
use anyhow::Result;
use ckpt_snapshot::{Manifest, ReadError, SnapshotId, Store as _, Tiers, faults};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// The parts in a store, with their IDs there.
pub(super) type Held = Vec<(SnapshotId, HeldPart)>;

/// Whether a part is here, or only in the memory of the node that holds the replicas.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Here,
    Holder,
}

/// The parts in the store and in memory, those that another node holds included, oldest first.
fn all_parts(store: &Tiers) -> Result<BTreeMap<SnapshotId, Place>> {
    let here = tiers::list_local(store)?.into_iter();
    let mut parts: BTreeMap<_, _> = here.map(|listed| (listed.id, Place::Here)).collect();
    if let Ok(tier) = store.tier(REPLICA) {
        let listed = faults::hit("replicas-listed").map_err(anyhow::Error::from);
        match listed.and_then(|()| Ok(tier.store().list()?)) {
            Ok(listed) => {
                for one in listed {
                    parts.entry(one.id).or_insert(Place::Holder);
                }
            }
            Err(error) => tracing::warn!("the replicas of this node cannot be used: {error:#}"),
        }
    }
    Ok(parts)
}

/// The manifest of a part; `None`, and `missing` is told why, if the part counts as missing: it is damaged, or its holder does not
/// give it. Any other error may pass, and is none of the snapshot's: to pass over a snapshot for it would discard work.
fn manifest(
    store: &Tiers,
    (id, place): (&SnapshotId, Place),
    missing: impl FnOnce(ReadError),
) -> Result<Option<Manifest>> {
    let unreadable = |source| ReadError::Io { step: "read", path: id.to_string().into(), source };
    let counts_as_missing = |error: &ReadError| {
        place == Place::Holder || matches!(error, ReadError::Damaged { .. } | ReadError::Missing(_))
    };
    match faults::hit("part-manifest").map_err(unreadable).and_then(|()| store.manifest(id)) {
        Ok(manifest) => Ok(Some(manifest)),
        Err(error) if counts_as_missing(&error) => {
            missing(error);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Local ports of the connections in the parts, as far as they can be read.
pub(super) fn ports(store: &Tiers) -> BTreeSet<u16> {
    let parts = all_parts(store).unwrap_or_else(|error| {
        tracing::warn!("the ports of the job's connections are not known: {error:#}");
        BTreeMap::new()
    });
    let parts = parts.keys().filter_map(|id| store.manifest(id).ok()?.part);
    parts.flat_map(|part| part.ports).collect()
}

/// Says which parts count as missing, since they cannot be read.
///
/// # Errors
/// When the store cannot be read.
pub(super) fn warn_of_unreadable(store: &Tiers) -> Result<()> {
    for (id, place) in all_parts(store)? {
        manifest(store, (&id, place), |error| tracing::warn!("{error}: it counts as missing"))?;
    }
    Ok(())
}

/// The parts that this node can resume.
///
/// # Errors
/// When the store cannot be read. That may pass.
pub(super) fn held_parts(opened: &OpenedJob) -> Result<Held> {
    let OpenedJob { dir, store, .. } = opened;
    let (mut parts, history) = (Vec::new(), tiers::history(dir, None)?);
    for (id, place) in all_parts(store)? {
        let Some(manifest) = manifest(store, (&id, place), drop)? else { continue };
        parts.extend(HeldPart::of(&manifest, &history).map(|part| (id, part)));
    }
    Ok(parts)
}

/// An older snapshot may have its part.
#[derive(Debug, thiserror::Error)]
#[error("the part of the snapshot is not in the store any more, nor can another node give it")]
pub(super) struct MissingPart;

/// Where this launcher starts, as the coordinator says.
///
/// # Errors
/// [`MissingPart`]; or when the store cannot be read, which may pass.
pub(super) fn resume_point(cluster: &Cluster, opened: &OpenedJob, load: &Load) -> Result<Resume> {
    let Some((attempt, _)) = &load.from else { return Ok(Resume::Never) };
    let is_it = |(_, part): &(SnapshotId, HeldPart)| part.log == cluster.log().0 && part.attempt == *attempt;
    let found = held_parts(opened)?.into_iter().find(is_it);
    let (id, _) = found.ok_or(MissingPart)?;
    Ok(Resume::Snapshot(id.to_string()))
}

/// The same for the first session. What is wrong with the store, or with the holder of replicas, may pass: the part is asked for
/// again for a while. As long as it is missing, another snapshot is resumed. A launcher that `rejoins` leaves it to node 0 what
/// follows on another error. The inner error is the end of the job on all nodes.
///
/// # Errors
/// When the store cannot be read.
pub(super) fn first_resume_point(
    cluster: &Cluster,
    opened: &OpenedJob,
    mut load: Load,
    rejoins: bool,
) -> Result<Result<(Load, Resume), End>> {
    let until = Instant::now() + REPLICA_PATIENCE;
    loop {
        let error = match resume_point(cluster, opened, &load) {
            Ok(resume) => return Ok(Ok((load, resume))),
            Err(error) => error,
        };
        let is_missing = error.is::<MissingPart>();
        let may_pass = !is_missing || opened.replicas.is_some();
        // Unless the others have given up meanwhile.
        if may_pass && load.gate.end().is_none() && Instant::now() < until {
            tracing::debug!("{COULD_NOT_RESUME}: {error:#}. It is tried again");
            std::thread::sleep(REPLICA_RETRY_INTERVAL);
            continue;
        }
        if !is_missing && !rejoins {
            return Err(error);
        }
        tracing::error!("{COULD_NOT_RESUME}: {error:#}");
        load.gate.fail(&in_one_line(&error), blame(&error, is_missing));
        cluster.session_ended(ports(&opened.store));
        load = match next_load(cluster) {
            Ok(next) => next,
            Err(end) => return Ok(Err(end)),
        };
    }
}

/// Removes parts whose snapshot has no global manifest: it will never have one. What cannot be removed stays until the next start.
pub(super) fn remove_garbage(cluster: &Cluster, opened: &OpenedJob, load: &Load) {
    let (log, committed) = cluster.log();
    // An earlier coordinator may have committed it after the log was read.
    let is_resumed = |attempt| load.from.as_ref().is_some_and(|(from, _)| *from == attempt);
    let held = held_parts(opened).unwrap_or_else(|error| {
        tracing::debug!("it is not known which parts are not complete: {error:#}");
        Held::new()
    });
    // Of others, node 0 has not said whether they count.
    for (id, part) in cluster::newest(&held) {
        if part.log == log && !committed.contains(&part.attempt) && !is_resumed(part.attempt) {
            tracing::info!("the part {id} is removed: not all nodes have stored theirs");
            if opened.replicas.is_some()
                && let Err(error) = opened.store.remove_from(id, REPLICA)
            {
                tracing::debug!("its replica cannot be removed: {error}");
            }
            if let Err(error) = tiers::remove_part(&opened.store, &opened.dir, id) {
                tracing::warn!("the part {id} cannot be removed: {error:#}");
            }
        }
    }
}
