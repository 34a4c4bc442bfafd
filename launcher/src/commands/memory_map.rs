//! What `ckpt-run show` says of device memory.

use super::print;
use crate::device_memory;
use anyhow::Result;
use ckpt_protocol::agent::{GpuReport, RegionKind};
use ckpt_snapshot::{Manifest, Store};
use serde::Serialize;
use std::cmp::Reverse;

/// Regions of a process that are shown; there may be very many.
const SHOWN: usize = 12;

/// What a process had on its GPUs.
#[derive(Serialize)]
pub struct OnGpu {
    pid: u32,
    #[serde(flatten)]
    report: GpuReport,
}

/// What the processes of a snapshot had on their GPUs.
///
/// # Errors
/// Damage.
pub fn read(store: &dyn Store, manifest: &Manifest) -> Result<Vec<OnGpu>> {
    let of = |process| device_memory::read_report(store, manifest, process);
    manifest.gpu.iter().map(|process| Ok(OnGpu { pid: process.pid, report: of(process)? })).collect()
}

/// The same for people: a total, then each process with its largest regions first.
#[must_use]
pub fn lines(all: &[OnGpu]) -> Vec<String> {
    let sizes: Vec<_> = all.iter().map(|one| sizes(&one.report)).collect();
    let (bytes, changed_bytes) = sizes.iter().copied().fold(NONE, add);
    let mut lines = Vec::new();
    if !all.is_empty() {
        lines.push(format!(
            "device memory    {} in {}, {}",
            print::bytes(bytes),
            print::count(all.len() as u64, "process", "processes"),
            print::changed(changed_bytes)
        ));
    }
    for (one, (bytes, changed_bytes)) in all.iter().zip(sizes) {
        lines.push(String::new());
        lines.push(format!(
            "process {}: {} in {}, {}",
            one.pid,
            print::bytes(bytes),
            print::count(one.report.regions.len() as u64, "region", "regions"),
            print::changed(changed_bytes)
        ));
        lines.push(counts(&one.report));
        lines.extend(one.report.unparked_because.iter().map(|why| format!("not all was parked: {why}")));
        lines.extend(one.report.remarks.iter().cloned());
        lines.extend(regions(&one.report));
    }
    lines
}

/// All bytes, and changed ones if those are known.
type Sizes = (u64, Option<u64>);

const NONE: Sizes = (0, Some(0));

fn sizes(report: &GpuReport) -> Sizes {
    report.regions.iter().map(|region| (region.bytes, region.changed_bytes)).fold(NONE, add)
}

fn add(some: Sizes, more: Sizes) -> Sizes {
    let changed_bytes = some.1.zip(more.1).map(|(some, more)| some.saturating_add(more));
    (some.0.saturating_add(more.0), changed_bytes)
}

fn counts(report: &GpuReport) -> String {
    let counts = &report.counts;
    [
        print::count(counts.contexts, "context", "contexts"),
        print::count(counts.streams, "stream", "streams"),
        print::count(counts.events, "event", "events"),
        print::count(counts.modules, "module", "modules"),
        print::count(counts.graphs, "graph", "graphs"),
        print::count(counts.allocations, "allocation", "allocations"),
    ]
    .join(", ")
}

fn regions(report: &GpuReport) -> Vec<String> {
    let mut largest: Vec<_> = report.regions.iter().collect();
    largest.sort_by_key(|region| (Reverse(region.bytes), region.address));
    let rows = largest.iter().take(SHOWN).map(|region| {
        vec![
            if region.address == 0 { "not mapped".to_owned() } else { format!("{:#014x}", region.address) },
            print::bytes(region.bytes),
            region.changed_bytes.map_or_else(|| "?".to_owned(), print::bytes),
            kind(region.kind).to_owned(),
            region.device.to_string(),
            region.allocations.to_string(),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let mut lines = print::columns(&["ADDRESS", "SIZE", "CHANGED", "KIND", "DEVICE", "ALLOCATIONS"], rows);
    if let Some(more) = largest.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        lines.push(format!("… and {more} more; --json has them all"));
    }
    lines
}

fn kind(kind: RegionKind) -> &'static str {
    match kind {
        RegionKind::Allocation => "allocation",
        RegionKind::Slab => "small allocations",
        RegionKind::Pool => "pool",
        RegionKind::Program => "program's own",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_protocol::agent::Region;

    fn process(pid: u32, regions: u64) -> OnGpu {
        let region = |number: u64| Region {
            address: number << 21,
            bytes: number * 1000,
            device: 0,
            kind: RegionKind::Slab,
            allocations: number,
            offset: 0,
            changed_bytes: Some(10),
        };
        let regions = (0..regions).map(region).collect();
        OnGpu { pid, report: GpuReport { regions, ..GpuReport::default() } }
    }

    #[test]
    fn the_largest_come_first_and_long_lists_are_cut() {
        let lines = lines(&[process(7, 20), process(8, 1)]);
        assert_eq!(
            lines[0],
            "device memory    190.0 kB in 2 processes, 210 B changed since the checkpoint before"
        );
        assert_eq!(lines[2], "process 7: 190.0 kB in 20 regions, 200 B changed since the checkpoint before");
        assert_eq!(lines[3], "0 contexts, 0 streams, 0 events, 0 modules, 0 graphs, 0 allocations");
        assert!(lines[4].starts_with("ADDRESS") && lines[4].ends_with("ALLOCATIONS"), "{}", lines[4]);
        assert!(lines[5].starts_with("0x000002600000  19.0 kB"), "{}", lines[5]);
        assert!(lines[16].starts_with("0x000001000000  8.0 kB"), "{}", lines[16]);
        assert_eq!(lines[17], "… and 8 more; --json has them all");
        assert!(lines[lines.len() - 1].starts_with("not mapped"), "{lines:?}");
    }

    #[test]
    fn nothing_is_said_of_no_gpu() {
        assert_eq!(lines(&[]), [""; 0]);
    }
}
