//! `ckpt-run rm`: deletes snapshots, or complete jobs.

use super::jobs::{jobs, reclaim as reclaim_of_running};
use super::parts::resumable;
use super::print;
use super::snapshots::find_to_change;
use crate::cli::args::RmArgs;
use crate::cli::config::Config;
use crate::files::held as held_files;
use crate::job::{deletion, resume_point};
use crate::restore::kept;
use crate::store::marks;
use crate::store::root::{Root, is_removed};
use crate::store::tiers;
use crate::sys::error::bad_input;
use anyhow::{Result, anyhow, bail};
use ckpt_object_medium::Options;
use ckpt_snapshot::{
    Damage, JobDir, JobOutcome, Listed, OpenError, ReadError, SnapshotId, Store, Tiers, faults,
};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;

/// `ckpt-run rm ID…`: deletes the snapshots, and the tails that their resumes removed from files. Without `--force`, a
/// snapshot that the user has marked or that a job needs is not deleted, and then none is.
///
/// # Errors
/// Bad input, or a failed deletion.
pub fn remove(config: &Config, args: &RmArgs) -> Result<i32> {
    if !args.whole_jobs.is_empty() {
        return remove_whole(config, args);
    }
    let mut found: Vec<(JobDir, SnapshotId)> = Vec::new();
    for text in &args.ids {
        let (job, id) = find_to_change(config, text)?;
        if !found.iter().any(|(other, known)| *known == id && other.key() == job.key()) {
            found.push((job, id));
        }
    }
    // Those of a job together: its indexes are read once, and its space is reclaimed once.
    found.sort_by(|(one, _), (other, _)| one.key().cmp(other.key()));
    let of_jobs = || found.chunk_by(|(one, _), (other, _)| one.key() == other.key());
    if !args.force {
        let protections = |of_job| protections(config, of_job, &found);
        let reasons: Vec<_> = of_jobs().map(protections).collect::<Result<_>>()?;
        let reasons = reasons.concat();
        if !reasons.is_empty() {
            bail!(bad_input(anyhow!("nothing was deleted: {}. Delete it with --force", reasons.join("; "))));
        }
    }
    of_jobs().try_for_each(|found| remove_of_job(config, found, args))?;
    Ok(0)
}

/// `ckpt-run rm --whole-job JOB…`: deletes complete jobs. All are checked before anything is deleted.
fn remove_whole(config: &Config, args: &RmArgs) -> Result<i32> {
    let root = Root::open_to_change(&config.store)?;
    let mut found: Vec<JobDir> = Vec::new();
    for name in &args.whole_jobs {
        let rest = with_rest(config, &root, name)?;
        match &rest.map_or_else(|| jobs(config, &root, Some(name)), |rest| Ok(vec![rest]))?[..] {
            [job] if found.iter().any(|known| known.key() == job.key()) => {}
            [job] => found.push(job.clone()),
            several => {
                let names = several.iter().map(|job| job.key().to_string()).collect::<Vec<_>>().join(", ");
                bail!(bad_input(anyhow!("{name:?} is the beginning of several jobs, name one: {names}")));
            }
        }
    }
    for job in &found {
        if job.is_locked() {
            bail!(bad_input(anyhow!("the job {} is running, so nothing was deleted", job.key())));
        }
        deletion::check(&config.store, job)?;
        let marks = marks::of_all_machines(&config.store, job)?;
        let mut kept = marks::kept_elsewhere(&*tiers::open(&config.store, job)?, job)?;
        kept.extend(marks.kept().cloned());
        let kept: Vec<_> = kept.iter().map(ToString::to_string).collect();
        if !kept.is_empty() && !args.force {
            bail!(bad_input(anyhow!(
                "nothing was deleted: snapshots of the job {} are pinned or have a tag ({}). Delete it with --force",
                job.key(),
                kept.join(", ")
            )));
        }
    }
    for job in &found {
        let snapshots = tiers::open(&config.store, job)?.list()?;
        if !args.dry_run {
            let ids: Vec<_> = snapshots.iter().map(|one| one.id.clone()).collect();
            let _deletion = begin(config, job, &ids, args.force)?;
            deletion::delete(&config.store, job)?;
        }
        for one in &snapshots {
            say_removed(&one.id, job.key().as_str(), args.dry_run)?;
        }
        let what = if args.dry_run { "would remove" } else { "removed" };
        let said =
            writeln!(io::stdout(), "{what} the job {}: its record, journal, logs and kept files", job.key());
        print::printed(said, 0)?;
    }
    Ok(0)
}

/// The job of this name, if it was deleted and something is left of it.
fn with_rest(config: &Config, root: &Root, name: &str) -> Result<Option<JobDir>> {
    let found = root.all_jobs()?.into_iter().find(|job| job.key().as_str() == name);
    match found.filter(is_removed) {
        Some(job) if deletion::has_rest(&config.store, &job)? => Ok(Some(job)),
        _ => Ok(None),
    }
}

/// Records in the marks that the snapshots are being deleted: a mark that is set from now on comes too late, which its command
/// says.
///
/// # Errors
/// One of them was marked meanwhile, and `force` is not given. Nothing is deleted then. The marks cannot be written.
fn begin(config: &Config, job: &JobDir, ids: &[SnapshotId], force: bool) -> Result<Deletion> {
    let uploaded = tiers::uploaded_records(&config.store, job, Options::default())?;
    let places = [Some(job.clone()), uploaded].into_iter().flatten().collect();
    let deletion = Deletion { places, ids: ids.to_vec() };
    for records in &deletion.places {
        let begun = records.change_marks(|marks| {
            ids.iter().filter(|_| force).for_each(|id| marks.forget(id));
            marks.add_deletion(ids).len() == ids.len()
        });
        match begun {
            Ok(true) => {}
            // What is deleted makes room.
            Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::StorageFull => {}
            Ok(false) => {
                bail!(bad_input(anyhow!(
                    "nothing was deleted: a snapshot of the job {} was pinned or tagged meanwhile. Delete it with --force",
                    job.key()
                )));
            }
            Err(error) => return Err(error.into()),
        }
    }
    faults::hit("removal-recorded")?;
    // Another machine may have pinned one before it could know.
    let store = tiers::open(&config.store, job)?;
    let kept = marks::kept_elsewhere(&store, job)?;
    if let Some(id) = ids.iter().find(|id| !force && kept.contains(id)) {
        bail!(bad_input(anyhow!(
            "nothing was deleted: another machine has pinned or tagged {id} (`ckpt-run unpin --all-machines {id}`). Delete it with --force"
        )));
    }
    Ok(deletion)
}

/// What [`begin`] has recorded. It ends when this is dropped.
struct Deletion {
    /// With the marks.
    places: Vec<JobDir>,
    ids: Vec<SnapshotId>,
}

impl Drop for Deletion {
    fn drop(&mut self) {
        for records in &self.places {
            if let Err(error) = records.change_marks(|marks| marks.end_deletion(&self.ids)) {
                tracing::debug!("the marks of {} still name deleted snapshots: {error}", records.key());
            }
        }
    }
}

/// Deletes snapshots of one job. The space of those that are deleted is reclaimed also if one of them cannot be.
fn remove_of_job(config: &Config, found: &[(JobDir, SnapshotId)], args: &RmArgs) -> Result<()> {
    let (Some((job, _)), dry_run) = (found.first(), args.dry_run) else { return Ok(()) };
    if !dry_run {
        job.check_records()?;
    }
    let ids: Vec<_> = found.iter().map(|(_, id)| id.clone()).collect();
    let _deletion = (!dry_run).then(|| begin(config, job, &ids, args.force)).transpose()?;
    let store = tiers::open(&config.store, job)?;
    let removed = found.iter().try_for_each(|(_, id)| {
        if !dry_run {
            tiers::remove(&config.store, &store, job, id)?;
            kept::delete_kept_of(job, id);
            held_files::delete(job, id);
        }
        say_removed(id, job.key().as_str(), dry_run)
    });
    let reclaimed = if dry_run { Ok(()) } else { reclaim(config, &store, job) };
    removed.and(reclaimed)
}

/// Why some of these snapshots of one job should stay: the user has marked them, or without all of them the next run of the
/// job cannot be resumed. `all_deleted` are those of all jobs.
fn protections(
    config: &Config,
    deleted: &[(JobDir, SnapshotId)],
    all_deleted: &[(JobDir, SnapshotId)],
) -> Result<Vec<String>> {
    let Some((job, _)) = deleted.first() else { return Ok(Vec::new()) };
    let marks = marks::of_all_machines(&config.store, job)?;
    let deleted: BTreeSet<_> = deleted.iter().map(|(_, id)| id).collect();
    let store = tiers::open(&config.store, job)?;
    let all = store.list_checked()?;
    let candidates = resume_point::of_next_run(job, &store, &all)?;
    let candidates = resumable(config, job, candidates, all_deleted)?;
    let kept_elsewhere = marks::kept_elsewhere(&store, job)?;
    let of = |is_wanted: fn(&Listed) -> bool| {
        let is_one = |id: &&SnapshotId| all.iter().any(|one| one.id == **id && is_wanted(one));
        candidates.iter().filter(is_one).collect::<Vec<_>>()
    };
    let mut readable = of(|one| one.manifest.is_ok());
    if readable.is_empty() {
        // The lack may end: see `Damage::Lacking`.
        readable =
            of(|one| matches!(one.manifest, Err(ReadError::Damaged { damage: Damage::Lacking { .. }, .. })));
    }
    let (bad, good): (Vec<_>, Vec<_>) = readable.into_iter().partition(|id| marks.is_bad(id));
    // A resume tries bad ones only where there are no others.
    let kind = if good.is_empty() { bad } else { good };
    let are_last = kind.iter().all(|id| deleted.contains(id));
    let protection = |id: &&SnapshotId| {
        let mark = marks.of(id);
        if mark.is_some_and(|mark| mark.pinned) {
            return Some(format!("{id} is pinned (`ckpt-run unpin {id}`)"));
        }
        if let Some(tag) = mark.and_then(|mark| mark.tags.first()) {
            return Some(format!("{id} has the tag {tag:?} (`ckpt-run untag {id} {tag}`)"));
        }
        if kept_elsewhere.contains(*id) {
            return Some(format!(
                "another machine has pinned or tagged {id} (`ckpt-run unpin --all-machines {id}`)"
            ));
        }
        (are_last && kind.contains(id)).then(|| {
            format!(
                "{id} is the last snapshot from which the job {} can be resumed: it would start from the beginning",
                job.key()
            )
        })
    };
    Ok(deleted.iter().filter_map(protection).collect())
}

/// The work goes on if nobody reads what is said.
fn say_removed(id: &SnapshotId, job: &str, dry_run: bool) -> Result<()> {
    let what = if dry_run { "would remove" } else { "removed" };
    print::printed(writeln!(io::stdout(), "{what} {id} of job {job}"), 0)?;
    Ok(())
}

/// Reclaims the space of deleted snapshots. The launcher of a running job does that, between two checkpoints.
///
/// # Errors
/// When the store cannot be read or changed.
pub fn reclaim(config: &Config, store: &Tiers, job: &JobDir) -> Result<()> {
    let _lock = match job.lock_for_maintenance() {
        Ok(lock) => lock,
        // Another command, which reclaims it.
        Err(OpenError::Locked { is_maintenance: true, .. }) => return Ok(()),
        Err(OpenError::Locked { .. }) => {
            reclaim_of_running(job);
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    tracing::debug!("the space of deleted snapshots of the job {} is reclaimed", job.key());
    // The lock does not cover other machines. A snapshot that one of them is saving may need packs that look unused.
    let may_run_elsewhere = || -> Result<bool> {
        let record = job.record()?;
        Ok(record.is_none_or(|record| record.outcome == JobOutcome::Unfinished))
    };
    if job.records_medium().is_some() && may_run_elsewhere()? {
        tracing::warn!(
            "the job {} may be running on another machine: its next run reclaims the space, or the next `ckpt-run prune` after its end",
            job.key()
        );
        return Ok(());
    }
    match job.records_medium() {
        // A machine that starts the job now may have to save a snapshot once more.
        Some(_) => {
            let store = tiers::alone(&config.store, job);
            store.sweep()?;
            store.reclaim()?;
        }
        None => {
            tiers::reclaim_local(store, &AtomicBool::new(false))?;
        }
    }
    Ok(())
}
