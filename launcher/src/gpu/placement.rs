//! On which GPUs the processes of a snapshot are restored.
//!
//! The driver knows all GPUs of the machine in each process, also those that `CUDA_VISIBLE_DEVICES` hides. Its restore takes
//! the GPUs at the same places, whichever they are, or from 580 on those that pairs name: each GPU that it knows, and one of
//! the same type for its place (CUDA driver API reference, cuCheckpointProcessRestore; cuda-checkpoint issues 48, 54;
//! cuda-python pull request 1983).

use crate::agents::Placement;
use crate::sys::error::bad_input;
use crate::sys::gpus::{Gpu, GpuNeed, Gpus};
use anyhow::{Result, anyhow, bail};
use ckpt_protocol::agent::GpuPair;
use ckpt_snapshot::{GpuProcess, GpuRecord};
use std::collections::BTreeMap;

/// The option `--gpu-map`: GPUs of a snapshot, and those that take their places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuMap(Vec<(String, String)>);

impl GpuMap {
    /// Parses `OLD=NEW,…`; `None` if it is not of that form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let entry = |entry: &str| {
            let (old, new) = entry.split_once('=')?;
            let is_uuid = |text: &str| text.starts_with("GPU-") && text.len() > "GPU-".len();
            (is_uuid(old) && is_uuid(new)).then(|| (old.to_owned(), new.to_owned()))
        };
        entries.map(entry).collect::<Option<_>>().map(Self)
    }

    /// The entry for a GPU. As in `CUDA_VISIBLE_DEVICES`, the beginning of a UUID is enough.
    fn of(&self, uuid: &str) -> Option<&str> {
        self.0.iter().find(|(old, _)| uuid.starts_with(old)).map(|(_, new)| new.as_str())
    }
}

/// A GPU of a snapshot.
struct Old<'a> {
    record: &'a GpuRecord,
    /// Whether a process has memory on it.
    is_used: bool,
}

/// The GPUs of all processes, each once.
fn old_gpus(processes: &[GpuProcess]) -> Vec<Old<'_>> {
    let mut all: Vec<Old> = Vec::new();
    for record in processes.iter().flat_map(|process| &process.gpus) {
        let is_used = record.needed_bytes() > 0;
        match all.iter_mut().find(|old| old.record.uuid == record.uuid) {
            Some(old) => old.is_used |= is_used,
            None => all.push(Old { record, is_used }),
        }
    }
    all
}

/// Where each process is restored, by its ID. Empty if that is not known: a snapshot of an older build, or no NVML.
///
/// # Errors
/// Bad input: a GPU of the snapshot has no successor here, or the driver is too old, or the map is wrong.
pub fn plan(
    processes: &[GpuProcess],
    wanted: &GpuMap,
    machine: Option<&Gpus>,
) -> Result<BTreeMap<u32, Placement>> {
    let old = old_gpus(processes);
    let is_wanted = !wanted.0.is_empty();
    let machine = match machine {
        Some(machine) if !old.is_empty() => machine,
        None if is_wanted && !processes.is_empty() => {
            return Err(bad_input(anyhow!(
                "--gpu-map needs NVML (libnvidia-ml.so.1), which does not work here"
            )));
        }
        Some(_) if is_wanted && !processes.is_empty() => {
            return Err(bad_input(anyhow!(
                "--gpu-map: the snapshot does not say which GPUs it was taken with, since NVML did not work then, or ckpt-run was older"
            )));
        }
        _ => return Ok(BTreeMap::new()),
    };
    let successors = Assignment::make(&old, wanted, &machine.gpus).map_err(bad_input)?;
    let placements: BTreeMap<u32, Placement> =
        processes.iter().map(|process| (process.pid, placement(process, &successors, machine))).collect();
    if placements.values().any(|placement| !placement.pairs.is_empty()) && !machine.can_migrate() {
        return Err(bad_input(too_old(&old, &successors, machine)));
    }
    Ok(placements)
}

fn placement(process: &GpuProcess, successors: &Assignment, machine: &Gpus) -> Placement {
    let pair = |gpu: &GpuRecord| GpuPair { old: gpu.uuid.clone(), new: successors.of(&gpu.uuid).to_owned() };
    let mut pairs: Vec<GpuPair> = process.gpus.iter().map(pair).collect();
    let known = pairs.iter().map(|pair| pair.new.clone()).collect();
    let need =
        |(gpu, pair): (&GpuRecord, &GpuPair)| GpuNeed { uuid: pair.new.clone(), bytes: gpu.needed_bytes() };
    let needs = process.gpus.iter().zip(&pairs).map(need).filter(|need| need.bytes > 0).collect();
    let is_in_place = |(pair, gpu): (&GpuPair, &Gpu)| pair.old == pair.new && pair.new == gpu.uuid;
    if pairs.len() <= machine.gpus.len() && pairs.iter().zip(&machine.gpus).all(is_in_place) {
        pairs.clear();
    }
    Placement { pairs, known, needs }
}

fn too_old(old: &[Old], successors: &Assignment, machine: &Gpus) -> anyhow::Error {
    let moved = old.iter().find(|old| successors.of(&old.record.uuid) != old.record.uuid);
    let why = match moved {
        Some(Old { record, .. }) => {
            format!("{} would take the place of {}", successors.of(&record.uuid), named(record))
        }
        None => "the order of the GPUs has changed".to_owned(),
    };
    anyhow!(
        "the snapshot's GPUs are not the same here: {why}. A restore on other GPUs needs NVIDIA's driver 580 or newer, and this machine has {}",
        machine.driver
    )
}

fn named(gpu: &GpuRecord) -> String {
    format!("{} ({})", gpu.uuid, gpu.name)
}

/// Which GPU takes the place of which.
struct Assignment<'a> {
    pairs: BTreeMap<&'a str, &'a str>,
}

impl<'a> Assignment<'a> {
    /// First what the map says. Then each GPU that is still there stays. Then others of the same type take the places of what
    /// is missing: the one with the most free memory first, and for GPUs with memory of the job first.
    fn make(old: &'a [Old<'a>], wanted: &GpuMap, machine: &'a [Gpu]) -> Result<Self> {
        let mut assignment = Self { pairs: BTreeMap::new() };
        let (used, unused): (Vec<_>, Vec<_>) = old.iter().partition(|old| old.is_used);
        for (entry, _) in &wanted.0 {
            if !used.iter().any(|old| old.record.uuid.starts_with(entry)) {
                tracing::warn!(
                    "--gpu-map: the snapshot has nothing on the GPU {entry}: this part is ignored"
                );
            }
        }
        for old in &used {
            if let Some(new) = wanted.of(&old.record.uuid) {
                assignment.add(old.record, find(machine, new)?)?;
            }
        }
        let all = || used.iter().chain(&unused);
        for old in all() {
            let same = machine.iter().find(|gpu| gpu.uuid == old.record.uuid);
            if let Some(same) = same.filter(|same| assignment.is_free(old.record, same)) {
                assignment.add(old.record, same)?;
            }
        }
        for old in all() {
            assignment.add_any(old.record, machine)?;
        }
        Ok(assignment)
    }

    /// Whether an old GPU has no successor yet, and the new one takes no place yet.
    fn is_free(&self, old: &GpuRecord, new: &Gpu) -> bool {
        !self.pairs.contains_key(old.uuid.as_str()) && !self.pairs.values().any(|taken| *taken == new.uuid)
    }

    fn add(&mut self, old: &'a GpuRecord, new: &'a Gpu) -> Result<()> {
        if old.name != new.name {
            bail!(
                "{} ({}) cannot take the place of {}: it is of another type",
                new.uuid,
                new.name,
                named(old)
            );
        }
        if !self.is_free(old, new) {
            bail!("--gpu-map: {} would take the places of two GPUs", new.uuid);
        }
        self.pairs.insert(&old.uuid, &new.uuid);
        Ok(())
    }

    fn add_any(&mut self, old: &'a GpuRecord, machine: &'a [Gpu]) -> Result<()> {
        if self.pairs.contains_key(old.uuid.as_str()) {
            return Ok(());
        }
        let candidates = machine.iter().filter(|gpu| gpu.name == old.name && self.is_free(old, gpu));
        let Some(new) = candidates.max_by_key(|gpu| gpu.free_bytes) else {
            bail!(
                "no {} is left here to take the place of {}. The driver wants one for each GPU of the machine that the snapshot was taken on. This machine has {}",
                old.name,
                old.uuid,
                listed(machine)
            );
        };
        self.add(old, new)
    }

    fn of(&self, old: &str) -> &str {
        self.pairs.get(old).copied().unwrap_or_default()
    }
}

fn find<'a>(machine: &'a [Gpu], uuid: &str) -> Result<&'a Gpu> {
    let mut found = machine.iter().filter(|gpu| gpu.uuid.starts_with(uuid));
    match (found.next(), found.next()) {
        (Some(gpu), None) => Ok(gpu),
        (None, _) => bail!("--gpu-map names the GPU {uuid}, and this machine has {}", listed(machine)),
        _ => bail!(
            "--gpu-map names the GPU {uuid}, which is the beginning of several here: {}",
            listed(machine)
        ),
    }
}

fn listed(machine: &[Gpu]) -> String {
    let gpus: Vec<_> = machine.iter().map(|gpu| format!("{} ({})", gpu.uuid, gpu.name)).collect();
    if gpus.is_empty() { "none".to_owned() } else { gpus.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::error::BadInput;
    use crate::sys::gpus::tests::machine;
    use ckpt_snapshot::RelPath;

    /// A process and the GPUs that its driver knows: UUID, type, memory that it takes.
    fn process(pid: u32, gpus: &[(&str, &str, u64)]) -> GpuProcess {
        let gpu = |(uuid, name, bytes): &(&str, &str, u64)| GpuRecord {
            uuid: (*uuid).to_owned(),
            name: (*name).to_owned(),
            memory_bytes: 100,
            captured_bytes: *bytes,
            driver_bytes: None,
        };
        GpuProcess {
            pid,
            mirror: 1,
            mirror_bytes: 0,
            mirror_used_bytes: None,
            supports_loads: false,
            memory: None,
            report: RelPath::new("gpu/1.json").unwrap(),
            gpus: gpus.iter().map(gpu).collect(),
        }
    }

    fn map(text: &str) -> GpuMap {
        GpuMap::parse(text).unwrap()
    }

    /// The pairs of the process 1.
    fn pairs(process: GpuProcess, wanted: &str, machine: &Gpus) -> Result<Vec<(String, String)>> {
        let placements = plan(&[process], &map(wanted), Some(machine))?;
        Ok(placements[&1].pairs.iter().map(|pair| (pair.old.clone(), pair.new.clone())).collect())
    }

    fn expect(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(old, new)| ((*old).to_owned(), (*new).to_owned())).collect()
    }

    fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
        let error = result.unwrap_err();
        assert!(error.is::<BadInput>(), "{error:#}");
        format!("{error:#}")
    }

    const TWO: &[(&str, &str, u64)] = &[("GPU-a", "A", 5), ("GPU-b", "A", 0)];

    #[test]
    fn the_same_gpus_need_no_pairs() {
        let here = machine("575.1", &[("GPU-a", "A", 50), ("GPU-b", "A", 50), ("GPU-c", "B", 50)]);
        assert_eq!(pairs(process(1, TWO), "", &here).unwrap(), []);
        let placements = plan(&[process(1, TWO)], &map(""), Some(&here)).unwrap();
        assert_eq!(placements[&1].known, ["GPU-a", "GPU-b"]);
        assert_eq!(placements[&1].needs, [GpuNeed { uuid: "GPU-a".into(), bytes: 5 }]);
    }

    #[test]
    fn a_map_moves_what_is_used_and_the_rest_makes_room() {
        let here = machine("580.1", &[("GPU-a", "A", 50), ("GPU-b", "A", 50)]);
        let swapped = expect(&[("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")]);
        assert_eq!(pairs(process(1, TWO), "GPU-a=GPU-b", &here).unwrap(), swapped);
        // After the move, the same map says nothing of the GPU that is used now.
        let moved = [("GPU-a", "A", 0), ("GPU-b", "A", 5)];
        assert_eq!(pairs(process(1, &moved), "GPU-a=GPU-b", &here).unwrap(), []);
    }

    #[test]
    fn others_of_the_same_type_take_the_places_of_missing_ones() {
        let here = machine(
            "580.1",
            &[("GPU-x", "A", 10), ("GPU-y", "B", 90), ("GPU-b", "A", 20), ("GPU-z", "A", 30)],
        );
        let wanted = expect(&[("GPU-a", "GPU-z"), ("GPU-b", "GPU-b")]);
        assert_eq!(pairs(process(1, TWO), "", &here).unwrap(), wanted);
        let named = expect(&[("GPU-a", "GPU-x"), ("GPU-b", "GPU-b")]);
        assert_eq!(pairs(process(1, TWO), "GPU-a=GPU-x", &here).unwrap(), named);
        // All are there, in another order: without pairs the driver would take the wrong ones.
        let turned = machine("580.1", &[("GPU-b", "A", 1), ("GPU-a", "A", 1)]);
        let same = expect(&[("GPU-a", "GPU-a"), ("GPU-b", "GPU-b")]);
        assert_eq!(pairs(process(1, TWO), "", &turned).unwrap(), same);
    }

    #[test]
    fn what_cannot_be_placed_is_refused_by_name() {
        let one = machine("580.1", &[("GPU-b", "A", 50), ("GPU-c", "B", 50)]);
        let said = refusal(pairs(process(1, TWO), "", &one));
        assert!(said.contains("no A is left here to take the place of GPU-a"), "{said}");
        assert!(said.contains("GPU-b (A), GPU-c (B)"), "{said}");
        let said = refusal(pairs(process(1, TWO), "GPU-a=GPU-c", &one));
        assert!(said.contains("GPU-c (B) cannot take the place of GPU-a (A)"), "{said}");
        let said = refusal(pairs(process(1, TWO), "GPU-a=GPU-q", &one));
        assert!(said.contains("--gpu-map names the GPU GPU-q"), "{said}");
        let alike = machine("580.1", &[("GPU-cx", "A", 50), ("GPU-cy", "A", 50)]);
        let said = refusal(pairs(process(1, TWO), "GPU-a=GPU-c", &alike));
        assert!(
            said.contains("GPU-c, which is the beginning of several here: GPU-cx (A), GPU-cy (A)"),
            "{said}"
        );
        let both = process(1, &[("GPU-a", "A", 5), ("GPU-b", "A", 5)]);
        let three = machine("580.1", &[("GPU-a", "A", 1), ("GPU-b", "A", 1), ("GPU-c", "A", 1)]);
        let said = refusal(pairs(both, "GPU-a=GPU-c,GPU-b=GPU-c", &three));
        assert!(said.contains("GPU-c would take the places of two GPUs"), "{said}");
    }

    #[test]
    fn before_580_all_gpus_have_to_be_the_same_at_the_same_places() {
        let other = machine("575.57.08", &[("GPU-a", "A", 1), ("GPU-c", "A", 1)]);
        let said = refusal(pairs(process(1, TWO), "", &other));
        let told = "GPU-c would take the place of GPU-b (A). A restore on other GPUs needs NVIDIA's driver 580 or newer, and this machine has 575.57.08";
        assert!(said.contains(told), "{said}");
        let turned = machine("575.57.08", &[("GPU-b", "A", 1), ("GPU-a", "A", 1)]);
        assert!(refusal(pairs(process(1, TWO), "", &turned)).contains("the order of the GPUs has changed"));
    }

    #[test]
    fn without_records_or_nvml_only_a_map_is_refused() {
        let here = machine("580.1", &[("GPU-a", "A", 1)]);
        let old = process(1, &[]);
        assert_eq!(plan(std::slice::from_ref(&old), &map(""), Some(&here)).unwrap(), BTreeMap::new());
        assert_eq!(plan(&[process(1, TWO)], &map(""), None).unwrap(), BTreeMap::new());
        assert!(refusal(plan(&[old], &map("GPU-a=GPU-b"), Some(&here))).contains("does not say which GPUs"));
        assert!(refusal(plan(&[process(1, TWO)], &map("GPU-a=GPU-b"), None)).contains("NVML"));
        // A job without a GPU.
        assert_eq!(plan(&[], &map("GPU-a=GPU-b"), None).unwrap(), BTreeMap::new());
    }

    #[test]
    fn a_map_has_uuids_on_both_sides() {
        for bad in ["GPU-a", "0=1", "GPU-a=1", "=GPU-b", "GPU-=GPU-b", "GPU-a=GPU-"] {
            assert_eq!(GpuMap::parse(bad), None, "{bad}");
        }
        assert_eq!(map("GPU-a=GPU-b, GPU-c=GPU-d,").0.len(), 2);
    }
}
