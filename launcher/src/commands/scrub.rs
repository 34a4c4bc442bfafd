//! `ckpt-run verify --scrub`: verifies everything in the store, whether a snapshot needs it or not.

use super::jobs::jobs;
use super::print;
use crate::cli::config::Config;
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::error::EXIT_NEGATIVE;
use crate::sys::progress::Bar;
use anyhow::Result;
use ckpt_snapshot::{JobDir, Store};
use serde::Serialize;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;

#[derive(Serialize)]
struct Report {
    job: String,
    packs: usize,
    manifests: usize,
    bytes: u64,
    damage: Vec<String>,
}

/// Verifies the whole store; exit code 1 for damage.
///
/// # Errors
/// Bad input, or the store cannot be read.
pub fn scrub(config: &Config, json: bool) -> Result<i32> {
    let root = Root::open(&config.store)?;
    let mut reports = Vec::new();
    for job in jobs(config, &root, None)? {
        reports.push(scrub_job(config, &job)?);
    }
    let code = if reports.iter().all(|report| report.damage.is_empty()) { 0 } else { EXIT_NEGATIVE };
    if json {
        print::json(&reports)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    for report in &reports {
        let verdict = if report.damage.is_empty() { "sound" } else { "DAMAGED" };
        writeln!(
            out,
            "{}: {verdict}, {} in {}, {}",
            report.job,
            print::bytes(report.bytes),
            print::count(report.packs as u64, "pack"),
            print::count(report.manifests as u64, "manifest")
        )?;
        report.damage.iter().try_for_each(|damage| writeln!(out, "  {damage}"))?;
    }
    Ok(code)
}

fn scrub_job(config: &Config, job: &JobDir) -> Result<Report> {
    let store = tiers::packed(&config.store, job);
    let bar = Bar::new("scrubbing", store.pack_bytes()?);
    let scrubbed = store.scrub(&|bytes| bar.advance(bytes), &AtomicBool::new(false))?;
    let mut report = Report {
        job: job.key().to_string(),
        packs: scrubbed.packs,
        manifests: scrubbed.manifests,
        bytes: scrubbed.pack_bytes,
        damage: scrubbed.damage.iter().map(ToString::to_string).collect(),
    };
    // Snapshots of version 1 have no packs: each one is read.
    let version_1 = job.version_1();
    for listed in version_1.list()? {
        report.manifests += 1;
        let verified = listed.manifest.and_then(|manifest| {
            report.bytes += manifest.data_bytes();
            version_1.verify(&manifest, &|_| {})
        });
        report.damage.extend(verified.err().map(|error| error.to_string()));
    }
    Ok(report)
}
