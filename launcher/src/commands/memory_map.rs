//! Device memory in `ckpt-run show`.

use super::print;
use crate::gpu::device_memory;
use anyhow::Result;
use ckpt_protocol::agent::{GpuReport, Region, RegionFlags, RegionKind};
use ckpt_snapshot::{GpuProcess, GpuRecord, Manifest, Store};
use serde::Serialize;
use std::cmp::Reverse;

/// The number of regions shown for each process.
const SHOWN: usize = 12;

/// The number of calls shown for the origin of a region, innermost first.
const CALLS: usize = 5;

/// The GPU state of a process.
#[derive(Serialize)]
pub struct OnGpu {
    pid: u32,
    #[serde(flatten)]
    report: GpuReport,
    /// The host memory that the copy of its device memory takes at a resume; also in the manifest.
    #[serde(skip)]
    copy_bytes: u64,
    /// In the manifest, which is printed too.
    #[serde(skip)]
    gpus: Vec<GpuRecord>,
}

/// The GPU state of the processes of a snapshot.
///
/// # Errors
/// Damage.
pub fn read(store: &dyn Store, manifest: &Manifest) -> Result<Vec<OnGpu>> {
    let of = |process: &GpuProcess| {
        let report = device_memory::read_report(store, manifest, process)?;
        let copy_bytes = process.mirror_used_bytes.unwrap_or(process.mirror_bytes);
        Ok(OnGpu { pid: process.pid, report, copy_bytes, gpus: process.gpus.clone() })
    };
    manifest.gpu.iter().map(of).collect()
}

/// The lines of the report: a total, then each process with its largest regions first.
#[must_use]
pub fn lines(all: &[OnGpu]) -> Vec<String> {
    let sizes: Vec<_> = all.iter().map(|one| sizes(&one.report)).collect();
    let (bytes, changed_bytes) = sizes.iter().copied().fold(NONE, add);
    let mut lines = Vec::new();
    if !all.is_empty() {
        let holders = print::count(all.len() as u64, "process");
        lines.push(format!("device memory    {}", print::sizes(bytes, changed_bytes, &holders)));
    }
    let copy_bytes = all.iter().map(|one| one.copy_bytes).fold(0, u64::saturating_add);
    if copy_bytes > 0 {
        let copy = print::bytes(copy_bytes);
        lines.push(format!("its copy         takes up to {copy} of host memory at a resume"));
    }
    for (one, (bytes, changed_bytes)) in all.iter().zip(sizes) {
        lines.push(String::new());
        let holders = print::count(one.report.regions.len() as u64, "region");
        lines.push(format!("process {}: {}", one.pid, print::sizes(bytes, changed_bytes, &holders)));
        let used = one.gpus.iter().filter(|gpu| gpu.needed_bytes() > 0);
        lines.extend(used.map(|gpu| {
            let needed = print::bytes(gpu.needed_bytes());
            format!("on {} ({}), where a restore takes {needed}", gpu.uuid, gpu.name)
        }));
        lines.push(counts(&one.report));
        lines.extend(one.report.graph_memory.iter().map(|memory| {
            let (reserved, used) = (print::bytes(memory.reserved_bytes), print::bytes(memory.used_bytes));
            format!(
                "graphs reserve {reserved} on device {}, of which {used} are allocated; the driver saves it",
                memory.device
            )
        }));
        let unparked = one.report.unparked_because.iter();
        lines.extend(unparked.map(|why| format!("not all memory was parked: {why}")));
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
        print::count(counts.contexts, "context"),
        print::count(counts.streams, "stream"),
        print::count(counts.events, "event"),
        print::count(counts.modules, "module"),
        print::count(counts.graphs, "graph"),
        print::count(counts.allocations, "allocation"),
    ]
    .join(", ")
}

fn regions(report: &GpuReport) -> Vec<String> {
    let mut largest: Vec<_> = report.regions.iter().collect();
    largest.sort_by_key(|region| (Reverse(region.bytes), region.address));
    let shown = largest.get(..SHOWN).unwrap_or(&largest);
    let rows: Vec<_> = shown.iter().map(|region| row(region)).collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let head = &["ADDRESS", "SIZE", "CHANGED", "KIND", "DEVICE", "ALLOCATIONS", "FLAGS"];
    let mut table = print::columns(head, rows).into_iter();
    let mut lines: Vec<String> = table.next().into_iter().collect();
    for (line, region) in table.zip(shown) {
        lines.push(line);
        lines.extend(origin(report, region));
    }
    lines.extend(print::more(largest.len(), SHOWN));
    lines
}

fn row(region: &Region) -> Vec<String> {
    vec![
        if region.address == 0 { "not mapped".to_owned() } else { format!("{:#014x}", region.address) },
        print::bytes(region.bytes),
        region.changed_bytes.map_or_else(|| "?".to_owned(), print::bytes),
        kind(region.kind).to_owned(),
        region.device.to_string(),
        region.allocations.to_string(),
        flags(&region.flags),
    ]
}

fn flags(flags: &RegionFlags) -> String {
    let is_set = [
        (flags.is_parked, "parked"),
        (flags.is_shared, "shared"),
        (flags.is_exportable, "exportable"),
        (flags.is_of_host, "host"),
        (flags.is_compressible, "compressible"),
        (flags.is_rdma_capable, "rdma"),
    ];
    let mut words: Vec<String> =
        is_set.into_iter().filter(|(is_set, _)| *is_set).map(|(_, word)| word.to_owned()).collect();
    if flags.aliases > 0 {
        words.push(format!("aliases={}", flags.aliases));
    }
    if !flags.peers.is_empty() {
        let peers: Vec<String> = flags.peers.iter().map(ToString::to_string).collect();
        words.push(format!("peers={}", peers.join("+")));
    }
    words.join(",")
}

/// The calls that allocated a region, if known.
fn origin(report: &GpuReport, region: &Region) -> Vec<String> {
    let Some(calls) = region.origin.and_then(|index| report.origins.get(index)) else { return Vec::new() };
    let mut lines: Vec<String> = calls.iter().take(CALLS).map(|call| format!("    from {call}")).collect();
    if let Some(more) = calls.len().checked_sub(CALLS).filter(|&more| more > 0) {
        lines.push(format!("    … and {}", print::count(more as u64, "more call")));
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
    use ckpt_protocol::agent::GraphMemory;

    fn process(pid: u32, regions: u64) -> OnGpu {
        let region = |number: u64| Region {
            address: number << 21,
            bytes: number * 1000,
            device: 0,
            kind: RegionKind::Slab,
            allocations: number,
            offset: 0,
            changed_bytes: Some(10),
            flags: RegionFlags::default(),
            origin: None,
        };
        let regions = (0..regions).map(region).collect();
        OnGpu { pid, report: GpuReport { regions, ..GpuReport::default() }, copy_bytes: 0, gpus: Vec::new() }
    }

    #[test]
    fn the_largest_come_first_and_long_lists_are_cut() {
        let lines = lines(&[process(7, 20), process(8, 1)]);
        assert_eq!(
            lines[0],
            "device memory    190.0 kB in 2 processes, 210 B changed since the previous checkpoint"
        );
        assert_eq!(
            lines[2],
            "process 7: 190.0 kB in 20 regions, 200 B changed since the previous checkpoint"
        );
        assert_eq!(lines[3], "0 contexts, 0 streams, 0 events, 0 modules, 0 graphs, 0 allocations");
        assert!(lines[4].starts_with("ADDRESS") && lines[4].ends_with("ALLOCATIONS  FLAGS"), "{}", lines[4]);
        assert!(lines[5].starts_with("0x000002600000  19.0 kB"), "{}", lines[5]);
        assert!(lines[16].starts_with("0x000001000000  8.0 kB"), "{}", lines[16]);
        assert_eq!(lines[17], "… and 8 more; --json shows all");
        assert!(lines[lines.len() - 1].starts_with("not mapped"), "{lines:?}");
        let copied = |pid| OnGpu { copy_bytes: 1000, ..process(pid, 1) };
        let lines = super::lines(&[copied(7), copied(8)]);
        assert_eq!(lines[1], "its copy         takes up to 2.0 kB of host memory at a resume");
    }

    #[test]
    fn flags_origins_and_graphs_are_shown() {
        let mut process = process(7, 2);
        let report = &mut process.report;
        report.graph_memory = vec![GraphMemory { device: 1, used_bytes: 1000, reserved_bytes: 2000 }];
        report.origins = vec![vec!["a+0x1".into()], (0..7).map(|call| format!("b+0x{call}")).collect()];
        report.regions[1].flags = RegionFlags {
            is_parked: true,
            is_shared: true,
            is_exportable: true,
            is_of_host: true,
            is_compressible: true,
            is_rdma_capable: true,
            aliases: 1,
            peers: vec![1, 3],
        };
        report.regions[1].origin = Some(1);
        // Not in the table: a report from another program.
        report.regions[0].origin = Some(2);
        let lines = lines(&[process]);
        assert_eq!(
            lines[4],
            "graphs reserve 2.0 kB on device 1, of which 1.0 kB are allocated; the driver saves it"
        );
        let flags = "  parked,shared,exportable,host,compressible,rdma,aliases=1,peers=1+3";
        assert!(lines[6].starts_with("0x000000200000") && lines[6].ends_with(flags), "{}", lines[6]);
        let calls: Vec<String> = (0..5).map(|call| format!("    from b+0x{call}")).collect();
        assert_eq!(lines[7..12], calls);
        assert_eq!(lines[12], "    … and 2 more calls");
        assert!(lines[13].starts_with("not mapped") && lines.len() == 14, "{lines:?}");
    }

    /// A report from before flags, origins and the memory of graphs.
    #[test]
    fn an_older_report_reads() {
        let text = r#"{"regions":[{"address":4096,"bytes":8,"device":0,"kind":"pool","allocations":1,"offset":0,
            "changed_bytes":4}],"counts":{"graphs":2},"times":{"drain_s":0.5},"parked_bytes":8}"#;
        let report: GpuReport = serde_json::from_str(text).expect("a report");
        let lines = lines(&[OnGpu { pid: 7, report, copy_bytes: 0, gpus: Vec::new() }]);
        assert!(lines[5].starts_with("0x000000001000  8 B") && lines[5].ends_with("  1"), "{lines:?}");
        assert_eq!(lines.len(), 6);
    }

    #[test]
    fn a_job_without_gpus_has_no_lines() {
        assert_eq!(lines(&[]), [""; 0]);
    }
}
