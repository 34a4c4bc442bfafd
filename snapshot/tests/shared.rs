//! Two machines that know nothing of each other use one store, as object stores are used.

mod common;

use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use common::manifest;
use common::memory::Memory;
use common::small::{Parts, content, file, holds, save};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn store(memory: &Memory) -> PackStore {
    let limits = Limits { workers: 1, loaders: 1, pack_bytes: 2000, ..Limits::remote() };
    PackStore::new(Arc::new(memory.clone()), Codec::default(), limits)
}

/// Begins the snapshot number `sequence` and gives it these chunks.
fn begin<'a>(store: &'a PackStore, sequence: u64, parts: &[u64]) -> Box<dyn SnapshotWriter + 'a> {
    let content = content(parts);
    let mut writer = store.begin(&manifest(sequence).id, content.len() as u64).unwrap();
    writer.put(&[Input { path: file(), from: &Parts(&content) }], &|_| {}).unwrap();
    writer
}

#[test]
fn packs_of_a_snapshot_that_is_being_written_stay() {
    let memory = Memory::default();
    let (one, other) = (store(&memory), store(&memory));
    save(&other, 1, &[50, 51]).unwrap();
    let writer = begin(&one, 2, &(1..=10).collect::<Vec<_>>());
    // A pack whose index is still to come.
    let pack = memory.names(".pack").pop().unwrap();
    memory.set("packs/00000000000000000000000000000007.pack", memory.objects()[&pack].to_vec());
    let before = memory.names("");
    assert!(before.len() > 8, "{before:?}");
    assert!(other.sweep().unwrap().is_empty());
    assert_eq!(other.reclaim().unwrap(), Reclaimed::default());
    assert_eq!(memory.names(""), before);
    writer.commit(manifest(2)).unwrap();
    holds(&store(&memory), 2, &(1..=10).collect::<Vec<_>>()).unwrap();
    // Those that nobody has come back for go in time.
    one.remove(&manifest(2).id).unwrap();
    memory.grow_old();
    assert_eq!(other.sweep().unwrap(), ["packs/00000000000000000000000000000007.pack"]);
    assert!(other.reclaim().unwrap().freed_bytes > 10_000);
    holds(&store(&memory), 1, &[50, 51]).unwrap();
}

#[test]
fn what_one_has_written_itself_goes_at_once() {
    let memory = Memory::default();
    let (one, other) = (store(&memory), store(&memory));
    save(&one, 1, &[1, 2, 3]).unwrap();
    save(&other, 2, &[4, 5, 6]).unwrap();
    one.remove(&manifest(1).id).unwrap();
    one.remove(&manifest(2).id).unwrap();
    let before = memory.names(".pack").len();
    assert!(one.reclaim().unwrap().freed_bytes > 3000);
    assert_eq!(memory.names(".pack").len(), before / 2, "the other one's stay");
    assert!(other.reclaim().unwrap().freed_bytes > 3000);
    assert!(memory.names(".pack").is_empty());
}

#[test]
fn what_another_machine_has_removed_is_stored_anew() {
    let memory = Memory::default();
    let (one, other) = (store(&memory), store(&memory));
    save(&one, 1, &[1, 2, 3]).unwrap();
    save(&other, 2, &[9]).unwrap();
    other.remove(&manifest(1).id).unwrap();
    memory.grow_old();
    assert!(other.reclaim().unwrap().freed_bytes > 3000);
    save(&one, 3, &[1, 2, 3]).unwrap();
    holds(&store(&memory), 3, &[1, 2, 3]).unwrap();
}

#[test]
fn what_another_machine_removes_meanwhile_is_found_missing() {
    let memory = Memory::default();
    let (one, other) = (store(&memory), store(&memory));
    save(&one, 1, &[1, 2, 3]).unwrap();
    save(&one, 2, &[9]).unwrap();
    one.remove(&manifest(1).id).unwrap();
    memory.grow_old();
    let writer = begin(&one, 3, &[1, 2, 3, 4]);
    assert!(other.reclaim().unwrap().freed_bytes > 3000, "it cannot know");
    let error = writer.commit(manifest(3)).unwrap_err();
    assert!(matches!(error, SaveError::Overtaken(_)), "{error}");
    assert_eq!(store(&memory).list().unwrap().len(), 1, "it is not there");
    save(&one, 4, &[1, 2, 3, 4]).unwrap();
    holds(&store(&memory), 4, &[1, 2, 3, 4]).unwrap();
    holds(&store(&memory), 2, &[9]).unwrap();
}

#[test]
fn what_another_machine_moves_meanwhile_is_found() {
    let memory = Memory::default();
    let (one, other) = (store(&memory), store(&memory));
    let limits = Limits { workers: 1, loaders: 1, ..Limits::remote() };
    let long = PackStore::new(Arc::new(memory.clone()), Codec::default(), limits);
    save(&long, 1, &(1..=10).collect::<Vec<_>>()).unwrap();
    save(&long, 2, &[1, 2, 3]).unwrap();
    long.remove(&manifest(1).id).unwrap();
    memory.grow_old();
    let writer = begin(&one, 3, &[1, 2, 3]);
    assert_eq!(other.reclaim().unwrap().moved_bytes, 3000);
    writer.commit(manifest(3)).unwrap();
    holds(&store(&memory), 3, &[1, 2, 3]).unwrap();
}

/// Its save was killed before it was checked, and another machine deleted packs meanwhile.
#[test]
fn a_copy_that_lacks_data_is_replaced() {
    let (memory, disk) = (Memory::default(), Memory::default());
    let tier = |name: &str, medium: &Memory| Tier::new(name, Box::new(store(medium)), true);
    let tiers = Tiers::new(vec![tier("disk", &disk), tier("remote", &memory)]);
    save(tiers.tier("disk").unwrap().store(), 1, &[1, 2, 3]).unwrap();
    let copy = || tiers.copy(&manifest(1).id, "disk", "remote", &|_| {}, &AtomicBool::new(false)).unwrap();
    copy();
    let packs = memory.names(".pack");
    let before = memory.names("");
    copy();
    assert_eq!(memory.names(""), before, "it was whole");
    for pack in &packs {
        memory.unset(pack);
        memory.unset(&pack.replace(".pack", ".index"));
    }
    assert!(holds(&store(&memory), 1, &[1, 2, 3]).is_err());
    copy();
    holds(&store(&memory), 1, &[1, 2, 3]).unwrap();
    // One that is about to be deleted does not count either.
    let ids: Vec<_> = memory.names(".pack").iter().map(|name| pack_id(name)).collect();
    packed::set_tombstone(&memory, &packed::new_tombstone().unwrap(), &ids).unwrap();
    copy();
    assert!(memory.names(".pack").len() > ids.len());
}

/// Its save was killed before it was checked, and another machine deleted packs meanwhile.
#[test]
fn a_snapshot_that_lacks_data_does_not_count_as_good() {
    let memory = Memory::default();
    let tiers = Tiers::new(vec![Tier::new("remote", Box::new(store(&memory)), true)]);
    let prunable = || {
        let (marks, history) = (Marks::default(), History::default());
        let ids = tiers.prunable(&["remote"], &Retention::newest(1), &marks, &history).unwrap();
        ids.iter().map(SnapshotId::sequence).collect::<Vec<_>>()
    };
    save(&tiers, 1, &[1]).unwrap();
    save(&tiers, 2, &[1, 2]).unwrap();
    let before = memory.names(".pack");
    save(&tiers, 3, &[2, 3]).unwrap();
    assert_eq!(prunable(), [1, 2]);
    let of_the_newest: Vec<_> =
        memory.names(".pack").into_iter().filter(|name| !before.contains(name)).collect();
    let ids: Vec<_> = of_the_newest.iter().map(|name| pack_id(name)).collect();
    // They may be about to be deleted.
    packed::set_tombstone(&memory, &packed::new_tombstone().unwrap(), &ids).unwrap();
    assert_eq!(prunable(), [1], "the last one with its data stays");
    memory
        .names("")
        .iter()
        .filter(|name| name.starts_with("tombstones/"))
        .for_each(|name| memory.unset(name));
    assert_eq!(prunable(), [1, 2]);
    for pack in &of_the_newest {
        memory.unset(pack);
        memory.unset(&pack.replace(".pack", ".index"));
    }
    assert_eq!(prunable(), [1]);
    let checked = tiers.list_checked().unwrap();
    let lacking = checked[2].manifest.as_ref().unwrap_err().to_string();
    assert!(lacking.contains("cannot be read: the store lacks data of"), "{lacking}");
    assert!(checked[..2].iter().all(|one| one.manifest.is_ok()));
    save(&tiers, 4, &[4]).unwrap();
    assert_eq!(prunable(), [1, 2], "nothing is deleted because of it");
}

fn pack_id(name: &str) -> pack::PackId {
    let name = name.strip_prefix("packs/").and_then(|name| name.strip_suffix(".pack"));
    pack::PackId::parse(name.expect("a pack")).expect("a pack's name")
}
