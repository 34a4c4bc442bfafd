//! `ckpt-run verify --scrub` verifies everything in the store, whether a snapshot needs it or not. `ckpt-run repair`
//! writes lost or damaged indexes again.

use super::jobs::{each, jobs};
use super::print;
use crate::cli::args::TierName;
use crate::cli::config::Config;
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::error::{EXIT_NEGATIVE, bad_input};
use crate::sys::progress::Bar;
use anyhow::{Result, anyhow, bail};
use ckpt_object_medium::Options;
use ckpt_snapshot::packed::PackStore;
use ckpt_snapshot::{JobDir, Store};
use serde::Serialize;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;

#[derive(Serialize)]
struct Report {
    job: String,
    tier: &'static str,
    packs: usize,
    manifests: usize,
    bytes: u64,
    read_bytes: u64,
    damage: Vec<String>,
}

/// Verifies every tier of the store, or one, reading this share of the data; exit code 1 for damage.
///
/// # Errors
/// Bad input, or the store cannot be read.
pub fn scrub(config: &Config, tier: Option<TierName>, share: f64, json: bool) -> Result<i32> {
    let root = Root::open(&config.store)?;
    let (reports, left_out) = each(&jobs(config, &root, None)?, |job| {
        let stores = tiers::pack_stores(&config.store, job)?.into_iter();
        let stores = stores.filter(|(name, _)| tier.is_none_or(|tier| tier.has(name)));
        let reports = stores.map(|(name, store)| scrub_tier(name, &store, job, share));
        let mut reports = reports.collect::<Result<Vec<_>>>()?;
        reports.first_mut().into_iter().for_each(|home| home.damage.extend(damaged_records(job)));
        Ok(reports)
    })?;
    let reports: Vec<_> = reports.into_iter().flatten().collect();
    if let (Some(tier), true, 0) = (tier, reports.is_empty(), left_out) {
        bail!(bad_input(anyhow!("there is nothing to verify: {}", tier.missing())));
    }
    let is_sound = reports.iter().all(|report| report.damage.is_empty());
    let code = if is_sound { left_out } else { EXIT_NEGATIVE };
    if json {
        print::json(&reports)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    for report in &reports {
        let verdict = if report.damage.is_empty() { "sound" } else { "DAMAGED" };
        let part =
            if share < 1.0 { format!(", {} read", print::bytes(report.read_bytes)) } else { String::new() };
        writeln!(
            out,
            "{}, {}: {verdict}, {} in {}, {}{part}",
            report.job,
            report.tier,
            print::bytes(report.bytes),
            print::count(report.packs as u64, "pack"),
            print::count(report.manifests as u64, "manifest")
        )?;
        report.damage.iter().try_for_each(|damage| writeln!(out, "  {damage}"))?;
    }
    Ok(code)
}

/// What is wrong with the newest records of a job.
pub(super) fn damaged_records(job: &JobDir) -> Vec<String> {
    let errors = [job.record().err(), job.marks().err()];
    errors.into_iter().flatten().map(|error| error.to_string()).collect()
}

fn scrub_tier(tier: &'static str, store: &PackStore, job: &JobDir, share: f64) -> Result<Report> {
    let bar = Bar::new("scrubbing", store.pack_bytes()?);
    let scrubbed = store.scrub(share, &|bytes| bar.advance(bytes), &AtomicBool::new(false))?;
    let mut report = Report {
        job: job.key().to_string(),
        tier,
        packs: scrubbed.packs,
        manifests: scrubbed.manifests,
        bytes: scrubbed.pack_bytes,
        read_bytes: scrubbed.read_bytes,
        damage: scrubbed.damage.iter().map(ToString::to_string).collect(),
    };
    if tier != tiers::DISK {
        return Ok(report);
    }
    // Snapshots of version 1 have no packs: each one is read.
    let version_1 = job.version_1();
    for listed in version_1.list()? {
        report.manifests += 1;
        let verified = listed.manifest.and_then(|manifest| {
            report.bytes += manifest.data_bytes();
            report.read_bytes += manifest.data_bytes();
            version_1.verify(&manifest, &|_| {})
        });
        report.damage.extend(verified.err().map(|error| error.to_string()));
    }
    Ok(report)
}

#[derive(Serialize)]
struct Repair {
    job: String,
    tier: &'static str,
    /// Records that have got a code of the key.
    adopted: Vec<String>,
    repaired: Vec<String>,
    unusable: Vec<String>,
}

/// Writes the lost or damaged indexes of packs again, in every tier; exit code 1 if one cannot be. Before that, signs
/// records of the job that have no code of the key, if that is asked for.
///
/// # Errors
/// Bad input: the job is running; there is no key to sign with. Or the store cannot be read or written.
pub fn repair(config: &Config, adopt_records: bool, json: bool) -> Result<i32> {
    if adopt_records && config.store.key.is_none() {
        return Err(bad_input(anyhow!("--adopt-records signs with a key: name it with --encrypt-key-file")));
    }
    let root = Root::open_to_change(&config.store)?;
    let jobs = jobs(config, &root, None)?;
    if adopt_records && jobs.len() > 1 {
        return Err(bad_input(anyhow!(
            "--adopt-records is for one job, and the store has several: name it with --job. A job whose records are signed cannot run without the key any more"
        )));
    }
    let (repairs, left_out) = each(&jobs, |job| {
        let _lock = job.lock_for_maintenance()?;
        let mut repairs = Vec::new();
        for (tier, store) in tiers::pack_stores(&config.store, job)? {
            let adopted = if adopt_records { adopt(config, job, tier)? } else { Vec::new() };
            let done = store.repair()?;
            let unusable = done.unusable.iter().map(|(pack, why)| format!("{pack}: {why}"));
            let records = if repairs.is_empty() { damaged_records(job) } else { Vec::new() };
            let unusable = unusable.chain(records).collect();
            repairs.push(Repair {
                job: job.key().to_string(),
                tier,
                adopted,
                repaired: done.packs,
                unusable,
            });
        }
        Ok(repairs)
    })?;
    let repairs: Vec<_> = repairs.into_iter().flatten().collect();
    let is_whole = repairs.iter().all(|repair| repair.unusable.is_empty());
    let code = if is_whole { left_out } else { EXIT_NEGATIVE };
    if json {
        print::json(&repairs)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    for Repair { job, tier, adopted, repaired, unusable } in &repairs {
        adopted.iter().try_for_each(|one| writeln!(out, "{job}, {tier}: {one}"))?;
        let count = print::count(repaired.len() as u64, "index file");
        writeln!(out, "{job}, {tier}: {count} written again")?;
        unusable.iter().try_for_each(|why| writeln!(out, "  NOT REPAIRED: {why}"))?;
    }
    Ok(code)
}

/// Signs the records of the job in this tier. Returns what was signed.
fn adopt(config: &Config, job: &JobDir, tier: &str) -> Result<Vec<String>> {
    let uploads = match (tier, job.records_medium()) {
        (tiers::REMOTE, None) => tiers::uploads(&config.store, job, Options::default())?,
        _ => None,
    };
    let dir = match uploads {
        Some(medium) => job.clone().with_content_in(medium),
        None => job.clone(),
    };
    let adopted = dir.adopt_records()?;
    Ok(adopted.iter().map(|(old, new)| format!("{} signed as {}", old.display(), new.display())).collect())
}
