//! `ckpt-run diff`: the memory that changed between two snapshots.

use super::print;
use super::snapshots::find;
use crate::cli::config::Config;
use crate::gpu::regions::{self, Memory, MemoryRegion, Owner, Reader, Readers};
use crate::store::tiers;
use anyhow::Result;
use ckpt_snapshot::{Manifest, Store};
use serde::Serialize;
use std::cmp::Reverse;
use std::io::{self, Write};

/// The unit of comparison: one changed byte counts as a whole page.
const PAGE_BYTES: u64 = 4096;
/// The number of regions shown.
const SHOWN: usize = 20;

#[derive(Serialize)]
struct Row {
    owner: String,
    region: String,
    #[serde(flatten)]
    sizes: Sizes,
}

#[derive(Default, Serialize)]
struct Sizes {
    bytes: u64,
    changed_bytes: u64,
    new_bytes: u64,
    gone_bytes: u64,
}

#[derive(Serialize)]
struct Difference {
    from: String,
    to: String,
    device_memory: Sizes,
    host_memory: Sizes,
    /// The regions with changes.
    regions: Vec<Row>,
}

/// Prints the changes from the snapshot `one` to the snapshot `other`.
///
/// # Errors
/// Bad input, or damage.
pub fn diff(config: &Config, one: &str, other: &str, json: bool) -> Result<i32> {
    let (one, other) = (find(config, one)?, find(config, other)?);
    let stores = (tiers::open(&config.store, &one.0)?, tiers::open(&config.store, &other.0)?);
    let manifests = (stores.0.manifest(&one.1)?, stores.1.manifest(&other.1)?);
    let mut before = Side::open(&*stores.0, &manifests.0)?;
    let mut after = Side::open(&*stores.1, &manifests.1)?;
    let mut difference = Difference {
        from: one.1.to_string(),
        to: other.1.to_string(),
        device_memory: Sizes::default(),
        host_memory: Sizes::default(),
        regions: Vec::new(),
    };
    let mut owners: Vec<Owner> = before.memory.keys().chain(after.memory.keys()).copied().collect();
    owners.sort();
    owners.dedup();
    for owner in owners {
        compare(owner, &mut before, &mut after, &mut difference)?;
    }
    if json {
        return print::json(&difference);
    }
    report(&mut difference)?;
    Ok(0)
}

/// One of the two snapshots.
struct Side<'a> {
    memory: Memory,
    readers: Readers<'a>,
}

impl<'a> Side<'a> {
    fn open(store: &'a dyn Store, manifest: &'a Manifest) -> Result<Self> {
        Ok(Self { memory: regions::of_all(store, manifest)?, readers: Readers::new(store, manifest) })
    }

    fn pieces(&self, owner: Owner) -> Vec<MemoryRegion> {
        let mapped = self.memory.get(&owner).into_iter().flatten().filter(|piece| piece.address.is_some());
        mapped.cloned().collect()
    }
}

fn compare(owner: Owner, before: &mut Side, after: &mut Side, difference: &mut Difference) -> Result<()> {
    let (old, new) = (before.pieces(owner), after.pieces(owner));
    let sums = match owner {
        Owner::Device { .. } => &mut difference.device_memory,
        _ => &mut difference.host_memory,
    };
    let row = |piece: &MemoryRegion, sizes| Row { owner: owner.to_string(), region: piece.name(), sizes };
    let mut met_bytes = vec![0; old.len()];
    for piece in &new {
        let begin = piece.address.unwrap_or(0);
        let end = begin + piece.bytes;
        let (mut changed_bytes, mut same_place_bytes) = (0, 0);
        let first = old.partition_point(|old| old.address.unwrap_or(0) + old.bytes <= begin);
        for (number, old) in old.iter().enumerate().skip(first) {
            let old_begin = old.address.unwrap_or(0);
            if old_begin >= end {
                break;
            }
            let from = begin.max(old_begin);
            let bytes = end.min(old_begin + old.bytes) - from;
            met_bytes[number] += bytes;
            same_place_bytes += bytes;
            let place = |piece: &MemoryRegion| piece.offset + (from - piece.address.unwrap_or(0));
            let (old_reader, new_reader) = (before.readers.of(&old.file)?, after.readers.of(&piece.file)?);
            changed_bytes += changed((old_reader, place(old)), (new_reader, place(piece)), bytes)?;
        }
        let new_bytes = piece.bytes - same_place_bytes;
        sums.bytes += piece.bytes;
        sums.changed_bytes += changed_bytes;
        sums.new_bytes += new_bytes;
        if changed_bytes + new_bytes > 0 {
            let sizes = Sizes { bytes: piece.bytes, changed_bytes, new_bytes, gone_bytes: 0 };
            difference.regions.push(row(piece, sizes));
        }
    }
    for (piece, met_bytes) in old.iter().zip(met_bytes).filter(|(piece, met_bytes)| *met_bytes < piece.bytes)
    {
        let gone_bytes = piece.bytes - met_bytes;
        sums.gone_bytes += gone_bytes;
        difference.regions.push(row(piece, Sizes { bytes: piece.bytes, gone_bytes, ..Sizes::default() }));
    }
    Ok(())
}

/// The number of bytes that differ, in whole pages, in two ranges of this length, each at an offset in its data file. Parts
/// in the same chunk of both are not read.
fn changed(
    (old_reader, old): (&mut Reader, u64),
    (new_reader, new): (&mut Reader, u64),
    bytes: u64,
) -> Result<u64> {
    let (mut done, mut changed_bytes) = (0, 0);
    while done < bytes {
        let left_bytes = bytes - done;
        let identities = old_reader.identity(old + done).zip(new_reader.identity(new + done));
        if let Some(((one, one_bytes), (other, other_bytes))) = identities
            && one == other
        {
            done += one_bytes.min(other_bytes).min(left_bytes);
            continue;
        }
        let step_bytes = PAGE_BYTES.min(left_bytes);
        let one = old_reader.read_all(old + done, step_bytes)?;
        if one != new_reader.read_all(new + done, step_bytes)? {
            changed_bytes += step_bytes;
        }
        done += step_bytes;
    }
    Ok(changed_bytes)
}

fn report(difference: &mut Difference) -> Result<()> {
    let mut out = io::stdout().lock();
    for (name, sums) in
        [("device memory", &difference.device_memory), ("host memory", &difference.host_memory)]
    {
        writeln!(
            out,
            "{name:14} {} changed, {} new, {} removed, of {}",
            print::bytes(sums.changed_bytes),
            print::bytes(sums.new_bytes),
            print::bytes(sums.gone_bytes),
            print::bytes(sums.bytes)
        )?;
    }
    let order =
        |Sizes { changed_bytes, new_bytes, gone_bytes, .. }: &Sizes| changed_bytes + new_bytes + gone_bytes;
    difference.regions.sort_by_key(|row| Reverse(order(&row.sizes)));
    let rows = difference.regions.iter().take(SHOWN).map(|Row { owner, region, sizes }| {
        let sizes = [sizes.bytes, sizes.changed_bytes, sizes.new_bytes, sizes.gone_bytes];
        [owner.clone(), region.clone()].into_iter().chain(sizes.map(print::bytes)).collect()
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        let head = &["OWNER", "ADDRESS", "SIZE", "CHANGED", "NEW", "REMOVED"];
        print::columns(head, rows).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    let more = print::more(difference.regions.len(), SHOWN);
    more.iter().try_for_each(|line| Ok(writeln!(out, "{line}")?))
}
