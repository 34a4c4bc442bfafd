//! `ckpt-run diff`: the memory that changed between two snapshots.

use super::print;
use super::snapshots::find;
use crate::cli::config::Config;
use crate::gpu::regions::{self, Memory, MemoryRegion, Owner, Reader};
use crate::store::tiers;
use anyhow::{Context, Result};
use ckpt_snapshot::{Manifest, RelPath, Store};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};

/// The unit of comparison: one changed byte counts as a whole page.
const PAGE_BYTES: u64 = 4096;
/// The number of regions shown.
const SHOWN: usize = 20;

#[derive(Serialize)]
struct Row {
    owner: String,
    region: String,
    bytes: u64,
    changed_bytes: u64,
    new_bytes: u64,
    gone_bytes: u64,
}

#[derive(Default, Serialize)]
struct Sums {
    bytes: u64,
    changed_bytes: u64,
    new_bytes: u64,
    gone_bytes: u64,
}

#[derive(Serialize)]
struct Difference {
    from: String,
    to: String,
    device_memory: Sums,
    host_memory: Sums,
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
    let mut before = Side::open(&*stores.0, stores.0.manifest(&one.1)?)?;
    let mut after = Side::open(&*stores.1, stores.1.manifest(&other.1)?)?;
    let mut difference = Difference {
        from: one.1.to_string(),
        to: other.1.to_string(),
        device_memory: Sums::default(),
        host_memory: Sums::default(),
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
    store: &'a dyn Store,
    manifest: Manifest,
    memory: Memory,
    readers: HashMap<RelPath, Reader<'a>>,
}

impl<'a> Side<'a> {
    fn open(store: &'a dyn Store, manifest: Manifest) -> Result<Self> {
        let mut memory = regions::of_devices(store, &manifest)?;
        memory.append(&mut regions::of_processes(store, &manifest)?);
        Ok(Self { store, manifest, memory, readers: HashMap::new() })
    }

    fn pieces(&self, owner: Owner) -> Vec<MemoryRegion> {
        let mapped = self.memory.get(&owner).into_iter().flatten().filter(|piece| piece.address.is_some());
        mapped.cloned().collect()
    }

    fn reader(&mut self, file: &RelPath) -> Result<&mut Reader<'a>> {
        if !self.readers.contains_key(file) {
            let reader = Reader::open(self.store, &self.manifest, file)?;
            self.readers.insert(file.clone(), reader);
        }
        self.readers.get_mut(file).context("the reader was just inserted")
    }
}

/// The overlap of two pieces in the address space.
struct Overlap<'a> {
    before: &'a MemoryRegion,
    after: &'a MemoryRegion,
    from: u64,
    bytes: u64,
}

fn compare(owner: Owner, before: &mut Side, after: &mut Side, difference: &mut Difference) -> Result<()> {
    let (old, new) = (before.pieces(owner), after.pieces(owner));
    let sums = match owner {
        Owner::Device { .. } => &mut difference.device_memory,
        _ => &mut difference.host_memory,
    };
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
            changed_bytes += changed(&Overlap { before: old, after: piece, from, bytes }, before, after)?;
        }
        let new_bytes = piece.bytes - same_place_bytes;
        sums.bytes += piece.bytes;
        sums.changed_bytes += changed_bytes;
        sums.new_bytes += new_bytes;
        if changed_bytes + new_bytes > 0 {
            let (owner, region) = (owner.to_string(), piece.name());
            let bytes = piece.bytes;
            difference.regions.push(Row { owner, region, bytes, changed_bytes, new_bytes, gone_bytes: 0 });
        }
    }
    for (piece, met_bytes) in old.iter().zip(met_bytes).filter(|(piece, met_bytes)| *met_bytes < piece.bytes)
    {
        let gone_bytes = piece.bytes - met_bytes;
        sums.gone_bytes += gone_bytes;
        let (owner, region) = (owner.to_string(), piece.name());
        difference.regions.push(Row {
            owner,
            region,
            bytes: piece.bytes,
            changed_bytes: 0,
            new_bytes: 0,
            gone_bytes,
        });
    }
    Ok(())
}

/// The number of bytes that differ, in whole pages. Parts in the same chunk of both are not read.
fn changed(overlap: &Overlap, before: &mut Side, after: &mut Side) -> Result<u64> {
    let offset = |piece: &MemoryRegion| piece.offset + (overlap.from - piece.address.unwrap_or(0));
    let (old, new) = (offset(overlap.before), offset(overlap.after));
    let old_reader = before.reader(&overlap.before.file)?;
    let new_reader = after.reader(&overlap.after.file)?;
    let (mut done, mut changed_bytes) = (0, 0);
    while done < overlap.bytes {
        let left_bytes = overlap.bytes - done;
        let identities = old_reader.identity(old + done).zip(new_reader.identity(new + done));
        if let Some(((one, one_bytes), (other, other_bytes))) = identities
            && one == other
        {
            done += one_bytes.min(other_bytes).min(left_bytes);
            continue;
        }
        let step_bytes = PAGE_BYTES.min(left_bytes);
        let one = page(old_reader, old + done, step_bytes)?;
        if one != page(new_reader, new + done, step_bytes)? {
            changed_bytes += step_bytes;
        }
        done += step_bytes;
    }
    Ok(changed_bytes)
}

/// A page, which may span two chunks.
fn page(reader: &mut Reader, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    while (page.len() as u64) < bytes {
        let done = page.len() as u64;
        page.extend_from_slice(reader.read(offset + done, bytes - done)?);
    }
    Ok(page)
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
    difference.regions.sort_by_key(|row| Reverse(row.changed_bytes + row.new_bytes + row.gone_bytes));
    let rows = difference.regions.iter().take(SHOWN).map(|row| {
        let size = print::bytes;
        vec![
            row.owner.clone(),
            row.region.clone(),
            size(row.bytes),
            size(row.changed_bytes),
            size(row.new_bytes),
            size(row.gone_bytes),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        let head = &["OWNER", "ADDRESS", "SIZE", "CHANGED", "NEW", "REMOVED"];
        print::columns(head, rows).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    if let Some(more) = difference.regions.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        writeln!(out, "… and {more} more; --json shows all")?;
    }
    Ok(())
}
