//! A directory that was moved with the store in it: its job has another key there, and would begin again without a word.

use super::startup::OpenedJob;
use crate::cli::config::Config;
use crate::job::resume_point::Resume;
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::error::bad_input;
use crate::sys::path_text::{path_text, text_path};
use anyhow::{Result, anyhow};
use ckpt_snapshot::{JobDir, JobOutcome, JobRecord};
use std::fs;
use std::path::Path;

/// Refuses to start a job from the beginning beside an unfinished job with the same command and snapshots, whose directory is
/// gone, or is this one by another path, in a store in this directory. If that directory is there, this one may be a copy: a
/// warning.
///
/// # Errors
/// Bad input, with the ways out.
pub(super) fn refuse(config: &Config, opened: &OpenedJob, resume: &Resume) -> Result<()> {
    let is_new = || opened.dir.record().is_ok_and(|record| record.is_none_or(|record| record.is_removed));
    if *resume != Resume::Auto || !is_in(&config.store.dir, &opened.identity.cwd) || !is_new() {
        return Ok(());
    }
    let leads_here = |record: &JobRecord| {
        fs::canonicalize(text_path(&record.cwd)).is_ok_and(|dir| path_text(&dir) == opened.identity.cwd)
    };
    let is_moved = |record: &JobRecord| {
        record.argv == opened.identity.argv
            && record.outcome != JobOutcome::Complete
            && !record.cwd.is_empty()
            && record.cwd != opened.identity.cwd
    };
    let moved = |job: JobDir| {
        let record = job.record().ok()??;
        let record = Some(record).filter(is_moved)?;
        let snapshots = tiers::list_local(&*tiers::open(&config.store, &job).ok()?).ok()?;
        (!snapshots.is_empty()).then_some((job, record))
    };
    let jobs = Root::open(&config.store).and_then(|root| root.jobs()).unwrap_or_default();
    let is_gone = |record: &JobRecord| matches!(text_path(&record.cwd).try_exists(), Ok(false));
    let is_refused = |record: &JobRecord| is_gone(record) || leads_here(record);
    let found: Vec<_> = jobs.into_iter().filter_map(moved).collect();
    let Some((job, record)) = found.iter().max_by_key(|(_, record)| is_refused(record)) else {
        return Ok(());
    };
    let (store, started_in) = (config.store.name(), text_path(&record.cwd));
    if !is_refused(record) {
        tracing::warn!(
            "the store {store} has the unfinished job {} with this command, which was started in {}. It is not resumed here: this directory may be a copy of that one. If it was moved, stop this job, move it back, and run the command there",
            job.key(),
            started_in.display()
        );
        return Ok(());
    }
    let what = if leads_here(record) {
        format!("That path leads to this directory now. To resume it: --job {}", job.key())
    } else {
        "That directory does not exist any more, and a job is resumed in its directory: move it back, and run the command there"
            .to_owned()
    };
    Err(bad_input(anyhow!(
        "the store {} has the unfinished job {} with this command, which was started in {}. {what}. To start from the beginning here: --resume never",
        store,
        job.key(),
        started_in.display()
    )))
}

/// Whether the store is in the working directory itself.
fn is_in(store: &Path, cwd: &str) -> bool {
    fs::canonicalize(store).is_ok_and(|store| store.parent().map(path_text).as_deref() == Some(cwd))
}
