//! Commands that read snapshots: `ls`, `show`, `verify`.

use super::job_files;
use super::jobs::{each, held, jobs};
use super::memory_map::{self, OnGpu};
use super::print;
use super::scrub::damaged_records;
use crate::cli::args::TierName;
use crate::cli::config::Config;
use crate::cluster::GlobalManifests;
use crate::files::inventory::Inventory;
use crate::job::resume_point::is_for_the_user;
use crate::job::status::cut_text;
use crate::store::marks;
use crate::store::root::Root;
use crate::store::tiers::{self, MEMORY};
use crate::sys::error::{EXIT_NEGATIVE, bad_input};
use crate::sys::path_text::shown;
use crate::sys::progress::Bar;
use crate::sys::secrets;
use anyhow::{Result, anyhow, bail};
use ckpt_protocol::control::Held;
use ckpt_snapshot::{
    DataFile, FailedProcess, History, JobDir, Manifest, Mark, Marks, NodePart, OpenFile, PlacedSnapshot,
    ReadError, SnapshotId, Store, Tier,
};
use serde::Serialize;
use std::cmp::Reverse;
use std::io::{self, Write};

/// Of a chunk that no index has.
const NO_PACK: &str = "is in no pack";
/// The number of files listed by `show`.
const LARGEST_FILES_SHOWN: usize = 5;

#[derive(Serialize)]
struct Row {
    id: SnapshotId,
    job: String,
    state: String,
    run: Option<u64>,
    taken_unix_ms: Option<u64>,
    bytes: Option<u64>,
    stored_bytes: Option<u64>,
    stall_s: Option<f64>,
    tags: Vec<String>,
    pinned: bool,
    tiers: Vec<String>,
    #[serde(skip)]
    is_readable: bool,
}

/// Adds the snapshots in the memory of the job's launcher.
fn add_held(rows: &mut Vec<Row>, job: &JobDir, held: Vec<Held>) {
    for held in held {
        let Ok(id) = held.id.parse::<SnapshotId>() else { continue };
        if let Some(row) = rows.iter_mut().find(|row| row.id == id && row.job == job.key().as_str()) {
            row.tiers.insert(0, MEMORY.to_owned());
            continue;
        }
        rows.push(Row {
            id,
            job: job.key().to_string(),
            state: "in memory only".to_owned(),
            run: Some(held.run),
            taken_unix_ms: Some(held.taken_unix_ms),
            bytes: Some(held.bytes),
            stored_bytes: held.stored_bytes,
            stall_s: Some(held.stall_s),
            tags: Vec::new(),
            pinned: false,
            tiers: vec![MEMORY.to_owned()],
            is_readable: true,
        });
    }
}

impl Row {
    fn new(
        job: &JobDir,
        placed: &PlacedSnapshot,
        (marks, history): (&Marks, &History),
        manifests: &mut GlobalManifests<'_>,
    ) -> Self {
        let listed = &placed.listed;
        let manifest = listed.manifest.as_ref().ok();
        let mark = marks.of(&listed.id);
        let state = match (&listed.manifest, marks.why_bad(&listed.id)) {
            (Ok(_), None) if history.is_abandoned(&listed.id) => {
                "abandoned: the job was resumed from an older one".to_owned()
            }
            (Ok(manifest), None) => {
                state_of_part(manifests, manifest).unwrap_or_else(|| "committed".to_owned())
            }
            (Ok(_), Some(why)) => format!("bad: {why}"),
            (Err(error), _) => error.to_string(),
        };
        Self {
            id: listed.id.clone(),
            job: job.key().to_string(),
            state,
            run: manifest.map(|manifest| manifest.run),
            taken_unix_ms: manifest.map(|manifest| manifest.taken_unix_ms),
            bytes: manifest.map(Manifest::data_bytes),
            stored_bytes: manifest.and_then(|manifest| manifest.stored_bytes),
            stall_s: manifest.map(|manifest| manifest.stall_s),
            tags: mark.map_or_else(Vec::new, |mark| mark.tags.iter().cloned().collect()),
            pinned: mark.is_some_and(|mark| mark.pinned),
            tiers: placed.tiers.iter().map(|place| place.tier.clone()).collect(),
            is_readable: manifest.is_some(),
        }
    }
}

/// The state of a part of a job on several nodes. Only the store of node 0 says which are committed.
fn state_of_part(manifests: &mut GlobalManifests<'_>, manifest: &Manifest) -> Option<String> {
    let part = manifest.part.as_ref()?;
    let NodePart { node, nodes, .. } = part;
    Some(match manifests.has(part) {
        Some(true) => format!("committed, node {node} of {nodes}"),
        Some(false) => format!("no global manifest, node {node} of {nodes}"),
        None => format!("part of node {node} of {nodes}"),
    })
}

impl Row {
    /// The state with the marks.
    fn state(&self) -> String {
        let pinned = self.pinned.then(|| "pinned".to_owned());
        let marks: Vec<_> = pinned.into_iter().chain(self.tags.iter().cloned()).collect();
        if marks.is_empty() { self.state.clone() } else { format!("{} ({})", self.state, marks.join(", ")) }
    }
}

/// `ckpt-run ls`.
///
/// # Errors
/// Bad input.
pub fn list(config: &Config, named: Option<&str>, json: bool) -> Result<i32> {
    let root = Root::open(&config.store)?;
    let (rows, code) = each(&jobs(config, &root, named)?, |job| {
        let (marks, history) = (marks::known(&config.store, job)?, tiers::history(job, None)?);
        let placed = tiers::open(&config.store, job)?.placed()?;
        let mut manifests = GlobalManifests::of(job);
        let row = |placed| Row::new(job, placed, (&marks, &history), &mut manifests);
        let mut of_job: Vec<_> = placed.iter().map(row).collect();
        add_held(&mut of_job, job, held(job));
        of_job.sort_by(|one, other| one.id.cmp(&other.id));
        Ok(of_job)
    })?;
    let rows: Vec<_> = rows.into_iter().flatten().collect();
    let code = if rows.iter().all(|row| row.is_readable) { code } else { EXIT_NEGATIVE };
    if json {
        print::json(&rows)?;
        return Ok(code);
    }
    if rows.is_empty() {
        writeln!(io::stderr(), "there are no snapshots in {}", root.name())?;
        return Ok(code);
    }
    let dash = || "-".to_owned();
    let cells = rows.iter().map(|row| {
        vec![
            row.id.to_string(),
            row.job.clone(),
            row.run.map_or_else(dash, |run| run.to_string()),
            row.taken_unix_ms.map_or_else(dash, print::ago),
            row.bytes.map_or_else(dash, print::bytes),
            row.stored_bytes.map_or_else(dash, print::bytes),
            row.stall_s.map_or_else(dash, |stall_s| format!("{stall_s:.2} s")),
            row.state(),
        ]
    });
    print::table(&["ID", "JOB", "RUN", "TAKEN", "SIZE", "STORED", "STALL", "STATE"], cells.collect())?;
    Ok(code)
}

/// The one snapshot that `text` names, in any job.
///
/// # Errors
/// Bad input: none, or several.
pub fn find(config: &Config, text: &str) -> Result<(JobDir, SnapshotId)> {
    find_in(config, &Root::open(&config.store)?, text)
}

/// As [`find`], for a command that changes the store.
///
/// # Errors
/// As [`find`]; a store of another user, for root.
pub fn find_to_change(config: &Config, text: &str) -> Result<(JobDir, SnapshotId)> {
    find_in(config, &Root::open_to_change(&config.store)?, text)
}

fn find_in(config: &Config, root: &Root, text: &str) -> Result<(JobDir, SnapshotId)> {
    // A variable of a script that is not set.
    if text.is_empty() {
        bail!(bad_input(anyhow!("the ID of the snapshot is empty; `ckpt-run ls` lists the snapshots")));
    }
    let (found, left_out) =
        each(&jobs(config, root, None)?, |job| {
            match (&*tiers::open(&config.store, job)? as &dyn Store).find(text) {
                Ok(id) => Ok(vec![(job.clone(), id)]),
                Err(ReadError::Missing(_)) => {
                    let marks = marks::known(&config.store, job)?;
                    Ok(marks.tagged(text).map(|id| (job.clone(), id.clone())).collect())
                }
                Err(error) => Err(error.into()),
            }
        })?;
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 if left_out != 0 => {
            bail!("the snapshot {text} is in none of the jobs that can be read")
        }
        0 => {
            refuse_in_memory(config, root, text)?;
            Err(ReadError::Missing(text.to_owned()).into())
        }
        _ => {
            let names = found
                .iter()
                .map(|(job, id)| format!("{id} of job {}", job.key()))
                .collect::<Vec<_>>()
                .join(", ");
            let is_one_job = found.iter().all(|(job, _)| job.key() == found[0].0.key());
            let remedy = if is_one_job { "Name one by its ID" } else { "Choose one with --job NAME" };
            bail!(bad_input(anyhow!("{text:?} is ambiguous: it matches {names}. {remedy}")))
        }
    }
}

/// A snapshot that only a launcher holds is listed by `ls`, but cannot be read.
fn refuse_in_memory(config: &Config, root: &Root, text: &str) -> Result<()> {
    for job in jobs(config, root, None)? {
        let ids = held(&job).into_iter().filter_map(|held| held.id.parse::<SnapshotId>().ok());
        if let Some(id) = ids.into_iter().find(|id| id.answers_to(text)) {
            bail!(bad_input(anyhow!(
                "the snapshot {id} is not in the store, only in the memory of the ckpt-run that runs the job {} (--persist-every). Run `ckpt-run checkpoint` for a snapshot in the store",
                job.key()
            )));
        }
    }
    Ok(())
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    manifest: &'a Manifest,
    gpu_processes: &'a [OnGpu],
    #[serde(skip_serializing_if = "Option::is_none")]
    job_files: Option<&'a Inventory>,
}

/// `ckpt-run show ID`.
///
/// # Errors
/// Bad input, or damage.
pub fn show(config: &Config, text: &str, json: bool) -> Result<i32> {
    let (job, id) = find(config, text)?;
    let store = tiers::open(&config.store, &job)?;
    let mut manifest = store.manifest(&id)?;
    let on_gpus = memory_map::read(&*store, &manifest)?;
    let job_files = Inventory::read(&*store, &manifest)?;
    // Only now: a changed manifest is not that of the snapshot any more.
    manifest.job.argv = secrets::hidden_in(&manifest.job.argv);
    if json {
        let job_files = job_files.as_ref();
        return print::json(&Shown { manifest: &manifest, gpu_processes: &on_gpus, job_files });
    }
    let mut facts = summary(&manifest);
    facts.extend(part_facts(&job, &manifest));
    let marks = marks::known(&config.store, &job)?;
    facts.extend(marks.of(&id).into_iter().flat_map(mark_facts));
    facts.extend(environment(&manifest));
    facts.extend(job_files.iter().flat_map(job_files::facts));
    let mut out = io::stdout().lock();
    facts.iter().try_for_each(|(name, value)| writeln!(out, "{name:16} {}", print::plain(value)))?;
    memory_map::lines(&on_gpus).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    Ok(0)
}

/// A line of `show`: name and value.
type Fact = (&'static str, String);

/// Job, time and size.
fn summary(manifest: &Manifest) -> Vec<Fact> {
    let (time, ago) = (print::time(manifest.taken_unix_ms), print::ago(manifest.taken_unix_ms));
    let mut facts = vec![
        ("snapshot", manifest.id.to_string()),
        ("job", format!("{} (run {})", manifest.job.key, manifest.run)),
        ("command", manifest.job.argv.join(" ")),
        ("directory", shown(&manifest.job.cwd).into_owned()),
        ("taken", format!("{time} ({ago})")),
        ("stall", format!("{:.3} s", manifest.stall_s)),
        ("size", format!("{} in {} files", print::bytes(manifest.data_bytes()), manifest.files.len())),
    ];
    facts.extend(manifest.cut.map(|cut| ("cut", cut_text(cut.duration_s, cut.attempts))));
    facts.extend(manifest.failed_process.as_ref().map(|failed| {
        let FailedProcess { name, pid, code } = failed;
        (
            "doubtful",
            format!(
                "{name} (PID {pid} in the job) had ended with exit code {code}: the job may be about to fail"
            ),
        )
    }));
    facts.extend(manifest.stored_bytes.map(|stored_bytes| {
        let saved = print::bytes(manifest.data_bytes().saturating_sub(stored_bytes));
        let stored = print::bytes(stored_bytes);
        ("stored", format!("{stored}; {saved} saved by sharing, compression, and omitted zeroes"))
    }));
    facts
}

/// Which part of a job on several nodes it is.
fn part_facts(job: &JobDir, manifest: &Manifest) -> Vec<Fact> {
    let Some(part) = &manifest.part else { return Vec::new() };
    let global = match GlobalManifests::of(job).has(part) {
        Some(true) => "committed: its log is in this store",
        Some(false) => "none: it is never resumed from",
        None => "see the store of node 0",
    };
    let addresses: Vec<_> = part.addresses.iter().map(ToString::to_string).collect();
    let snapshot = format!("{}.{} of the log {}", part.epoch, part.attempt, part.log);
    vec![
        ("part", format!("node {} of {}, snapshot {snapshot}", part.node, part.nodes)),
        ("global manifest", global.to_owned()),
        ("needs addresses", addresses.join(", ")),
        (
            "network of the job",
            part.network.as_ref().map_or_else(String::new, |network| network.subnet.clone()),
        ),
    ]
}

fn mark_facts(mark: &Mark) -> Vec<Fact> {
    let mut facts = vec![
        ("tags", mark.tags.iter().cloned().collect::<Vec<_>>().join(", ")),
        ("pinned", if mark.pinned { "yes" } else { "no" }.to_owned()),
    ];
    facts.extend(
        mark.failed_restores
            .iter()
            .map(|failed| ("failed restore", format!("{}: {}", print::ago(failed.unix_ms), failed.reason))),
    );
    facts
}

/// Processes, machine and files.
fn environment(manifest: &Manifest) -> Vec<Fact> {
    let (tree, host) = (&manifest.tree, &manifest.host);
    let mut facts = vec![
        ("threads", format!("{}, command is process {}", tree.threads, tree.command_pid)),
        ("machine", format!("{}, {} {}, {}", host.hostname, host.kernel, host.arch, host.cpu)),
        ("written by", format!("ckpt-run {}, CRIU {}", manifest.ckpt_run_version, manifest.criu_version)),
    ];
    let rolled_back =
        |file: &OpenFile| ("rolled back", format!("{} to {} bytes", file.path, file.size_bytes));
    // A newer snapshot lists all files of the job.
    let open_files = manifest.open_files.iter().filter(|_| manifest.inventory.is_none());
    facts.extend(open_files.map(rolled_back));
    facts.extend(manifest.shm_files.iter().map(|file| ("shared memory", file.path.clone())));
    let mut largest: Vec<_> = manifest.files.iter().collect();
    largest.sort_by_key(|file| Reverse(file.bytes));
    let size = |file: &&DataFile| ("file", format!("{} {}", file.path, print::bytes(file.bytes)));
    facts.extend(largest.iter().take(LARGEST_FILES_SHOWN).map(size));
    facts
}

#[derive(Serialize)]
struct Verdict {
    id: SnapshotId,
    job: String,
    tier: String,
    sound: bool,
    damage: Option<String>,
    bytes: u64,
}

/// `ckpt-run verify`, in every tier or in one: exit code 1 when something is damaged.
///
/// # Errors
/// Bad input.
pub fn verify(config: &Config, text: Option<&str>, tier: Option<TierName>, json: bool) -> Result<i32> {
    let (jobs, id) = match text {
        Some(text) => {
            let (job, id) = find(config, text)?;
            (vec![job], Some(id))
        }
        None => (jobs(config, &Root::open(&config.store)?, None)?, None),
    };
    let (mut has_tier, mut has_damaged_records) = (false, false);
    let (verdicts, left_out) = each(&jobs, |job| {
        let mut verdicts = Vec::new();
        let damaged = damaged_records(job);
        damaged.iter().for_each(|damage| tracing::error!("{damage}"));
        has_damaged_records |= !damaged.is_empty();
        let store = tiers::open(&config.store, job)?;
        for one in store.tiers().iter().filter(|one| tier.is_none_or(|tier| tier.has(one.name()))) {
            has_tier = true;
            let listed = one.store().list()?.into_iter().map(|listed| listed.id);
            for id in listed.filter(|listed| id.as_ref().is_none_or(|id| id == listed)) {
                verdicts.extend(verify_one(one, job, id)?);
            }
        }
        Ok(verdicts)
    })?;
    let verdicts: Vec<_> = verdicts.into_iter().flatten().collect();
    if let (Some(tier), false, 0) = (tier, has_tier, left_out) {
        bail!(bad_input(anyhow!("there is nothing to verify: {}", tier.missing())));
    }
    if let (Some(id), true) = (id, verdicts.is_empty()) {
        return Err(ReadError::Missing(id.to_string()).into());
    }
    let is_sound = !has_damaged_records && verdicts.iter().all(|verdict| verdict.sound);
    let code = if is_sound { left_out } else { EXIT_NEGATIVE };
    if json {
        return print::json_with(&verdicts, code);
    }
    let mut out = io::stdout().lock();
    if verdicts.is_empty() && left_out == 0 {
        return print::printed(writeln!(out, "there are no snapshots to verify"), code);
    }
    let said = verdicts.iter().try_for_each(|verdict| match &verdict.damage {
        None => {
            let bytes = print::bytes(verdict.bytes);
            writeln!(out, "{}  {}: sound, {bytes}", verdict.id, verdict.tier)
        }
        Some(damage) => writeln!(out, "{}  {}: DAMAGED: {damage}", verdict.id, verdict.tier),
    });
    if verdicts.iter().filter_map(|verdict| verdict.damage.as_ref()).any(|damage| damage.contains(NO_PACK)) {
        tracing::info!("`ckpt-run repair` writes lost or damaged indexes of packs again");
    }
    print::printed(said, code)
}

/// The verdict on a snapshot in a tier; `None` if it was removed meanwhile.
fn verify_one(tier: &Tier, job: &JobDir, id: SnapshotId) -> Result<Option<Verdict>> {
    let (store, mut bytes) = (tier.store(), 0);
    let result = store.manifest(&id).and_then(|manifest| {
        bytes = manifest.data_bytes();
        let bar = Bar::new("verifying", bytes);
        store.verify(&manifest, &|bytes| bar.advance(bytes))
    });
    let damage = match result {
        Err(_) if matches!(store.manifest(&id), Err(ReadError::Missing(_))) => {
            tracing::info!("{id} was pruned meanwhile");
            return Ok(None);
        }
        Err(error) if is_for_the_user(&error) => return Err(error.into()),
        result => result.err().map(|error| error.to_string()),
    };
    let (job, tier) = (job.key().to_string(), tier.name().to_owned());
    Ok(Some(Verdict { sound: damage.is_none(), id, job, tier, damage, bytes }))
}
