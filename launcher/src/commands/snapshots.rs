//! Commands about snapshots: `ls`, `show`, `verify`, `rm`, `prune`.

use super::jobs::{jobs, open_store};
use super::memory_map::{self, OnGpu};
use super::print;
use crate::config::Config;
use crate::failure::{EXIT_NEGATIVE, bad_input};
use crate::progress::Bar;
use anyhow::{Result, anyhow, bail};
use ckpt_snapshot::{DirStore, JobDir, Listed, Manifest, ReadError, SnapshotId, Store, choose_prunable};
use serde::Serialize;
use std::io::{self, Write};

#[derive(Serialize)]
struct Row {
    id: SnapshotId,
    job: String,
    state: String,
    run: Option<u64>,
    taken_unix_ms: Option<u64>,
    bytes: Option<u64>,
    stall_s: Option<f64>,
}

impl Row {
    fn new(job: &JobDir, listed: &Listed) -> Self {
        let manifest = listed.manifest.as_ref().ok();
        let state = match &listed.manifest {
            Ok(_) => "committed".to_owned(),
            Err(error) => error.to_string(),
        };
        Self {
            id: listed.id.clone(),
            job: job.key().to_string(),
            state,
            run: manifest.map(|manifest| manifest.run),
            taken_unix_ms: manifest.map(|manifest| manifest.taken_unix_ms),
            bytes: manifest.map(Manifest::data_bytes),
            stall_s: manifest.map(|manifest| manifest.stall_s),
        }
    }
}

/// `ckpt-run ls`.
///
/// # Errors
/// Bad input.
pub fn list(config: &Config, named: Option<&str>, json: bool) -> Result<i32> {
    let root = open_store(config)?;
    let mut rows = Vec::new();
    for job in jobs(config, &root, named)? {
        rows.extend(job.store().list()?.iter().map(|listed| Row::new(&job, listed)));
    }
    if json {
        return print::json(&rows);
    }
    if rows.is_empty() {
        writeln!(io::stderr(), "there are no snapshots in {}", root.path().display())?;
        return Ok(0);
    }
    let dash = || "-".to_owned();
    let cells = rows.iter().map(|row| {
        vec![
            row.id.to_string(),
            row.job.clone(),
            row.run.map_or_else(dash, |run| run.to_string()),
            row.taken_unix_ms.map_or_else(dash, print::ago),
            row.bytes.map_or_else(dash, print::bytes),
            row.stall_s.map_or_else(dash, |stall_s| format!("{stall_s:.2} s")),
            row.state.clone(),
        ]
    });
    print::table(&["ID", "JOB", "RUN", "TAKEN", "SIZE", "STALL", "STATE"], cells.collect())
}

/// The one snapshot that is meant, in whichever job it is.
fn find(config: &Config, text: &str) -> Result<(JobDir, SnapshotId)> {
    let root = open_store(config)?;
    let mut found = Vec::new();
    for job in jobs(config, &root, None)? {
        match (&job.store() as &dyn Store).find(text) {
            Ok(id) => found.push((job, id)),
            Err(ReadError::Missing(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(ReadError::Missing(text.to_owned()).into()),
        _ => {
            let names = found
                .iter()
                .map(|(job, id)| format!("{id} of job {}", job.key()))
                .collect::<Vec<_>>()
                .join(", ");
            bail!(bad_input(anyhow!("{text:?} may mean {names}: say which with --job NAME")))
        }
    }
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    manifest: &'a Manifest,
    gpu_processes: &'a [OnGpu],
}

/// `ckpt-run show ID`.
///
/// # Errors
/// Bad input, or damage.
pub fn show(config: &Config, text: &str, json: bool) -> Result<i32> {
    let (job, id) = find(config, text)?;
    let manifest = job.store().manifest(&id)?;
    let on_gpus = memory_map::read(&job.store(), &manifest)?;
    if json {
        return print::json(&Shown { manifest: &manifest, gpu_processes: &on_gpus });
    }
    let mut out = io::stdout().lock();
    let mut line = |name: &str, value: String| writeln!(out, "{name:16} {value}");
    line("snapshot", manifest.id.to_string())?;
    line("job", format!("{} (run {})", manifest.job.key, manifest.run))?;
    line("command", manifest.job.argv.join(" "))?;
    line("directory", manifest.job.cwd.clone())?;
    line(
        "taken",
        format!("{} ({})", print::time(manifest.taken_unix_ms), print::ago(manifest.taken_unix_ms)),
    )?;
    line("stall", format!("{:.3} s", manifest.stall_s))?;
    line("size", format!("{} in {} files", print::bytes(manifest.data_bytes()), manifest.files.len()))?;
    line("threads", format!("{}, command is process {}", manifest.tree.threads, manifest.tree.command_pid))?;
    line(
        "machine",
        format!(
            "{}, {} {}, {}",
            manifest.host.hostname, manifest.host.kernel, manifest.host.arch, manifest.host.cpu
        ),
    )?;
    line("written by", format!("ckpt-run {}, CRIU {}", manifest.ckpt_run_version, manifest.criu_version))?;
    for file in &manifest.open_files {
        line("rolled back", format!("{} to {} bytes", file.path, file.size_bytes))?;
    }
    for file in &manifest.shm_files {
        line("shared memory", file.path.clone())?;
    }
    let mut largest: Vec<_> = manifest.files.iter().collect();
    largest.sort_by_key(|file| std::cmp::Reverse(file.bytes));
    for file in largest.iter().take(5) {
        line("file", format!("{} {}", file.path, print::bytes(file.bytes)))?;
    }
    for text in memory_map::lines(&on_gpus) {
        writeln!(out, "{text}")?;
    }
    Ok(0)
}

#[derive(Serialize)]
struct Verdict {
    id: SnapshotId,
    job: String,
    sound: bool,
    damage: Option<String>,
    bytes: u64,
}

/// `ckpt-run verify`: exit code 1 when something is damaged.
///
/// # Errors
/// Bad input.
pub fn verify(config: &Config, text: Option<&str>, json: bool) -> Result<i32> {
    let targets: Vec<(JobDir, SnapshotId)> = match text {
        Some(text) => vec![find(config, text)?],
        None => {
            let root = open_store(config)?;
            let mut all = Vec::new();
            for job in jobs(config, &root, None)? {
                all.extend(job.store().list()?.into_iter().map(|listed| (job.clone(), listed.id)));
            }
            all
        }
    };
    let mut verdicts = Vec::new();
    for (job, id) in targets {
        let (bytes, result) = verify_one(&job.store(), &id);
        if let Err(error @ (ReadError::Newer { .. } | ReadError::Hostile { .. })) = result {
            return Err(error.into());
        }
        let damage = result.err().map(|error| error.to_string());
        verdicts.push(Verdict { sound: damage.is_none(), id, job: job.key().to_string(), damage, bytes });
    }
    let code = if verdicts.iter().all(|verdict| verdict.sound) { 0 } else { EXIT_NEGATIVE };
    if json {
        print::json(&verdicts)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    for verdict in &verdicts {
        match &verdict.damage {
            None => writeln!(out, "{}  sound, {}", verdict.id, print::bytes(verdict.bytes))?,
            Some(damage) => writeln!(out, "{}  DAMAGED: {damage}", verdict.id)?,
        }
    }
    Ok(code)
}

fn verify_one(store: &DirStore, id: &SnapshotId) -> (u64, Result<(), ReadError>) {
    let manifest = match store.manifest(id) {
        Ok(manifest) => manifest,
        Err(error) => return (0, Err(error)),
    };
    let bar = Bar::new("verifying", manifest.data_bytes());
    (manifest.data_bytes(), store.verify(&manifest, &|bytes| bar.advance(bytes)))
}

/// `ckpt-run rm ID`.
///
/// # Errors
/// Bad input, or it cannot be removed.
pub fn remove(config: &Config, text: &str) -> Result<i32> {
    let (job, id) = find(config, text)?;
    job.store().remove(&id)?;
    Ok(0)
}

#[derive(Serialize)]
struct Pruned {
    id: SnapshotId,
    job: String,
    removed: bool,
}

/// `ckpt-run prune`.
///
/// # Errors
/// Bad input, or one cannot be removed.
pub fn prune(config: &Config, named: Option<&str>, dry_run: bool, json: bool) -> Result<i32> {
    let root = open_store(config)?;
    let mut pruned = Vec::new();
    for job in jobs(config, &root, named)? {
        let store = job.store();
        for id in choose_prunable(&store.list()?, config.keep) {
            if !dry_run {
                store.remove(&id)?;
            }
            pruned.push(Pruned { id, job: job.key().to_string(), removed: !dry_run });
        }
    }
    if json {
        return print::json(&pruned);
    }
    let mut out = io::stdout().lock();
    for one in &pruned {
        writeln!(out, "{} {} of job {}", if dry_run { "would remove" } else { "removed" }, one.id, one.job)?;
    }
    if pruned.is_empty() {
        writeln!(out, "nothing to remove: no job has more than {} whole snapshots", config.keep)?;
    }
    Ok(0)
}
