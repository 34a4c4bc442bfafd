//! Garbage collection frees space and never deletes live chunks.

mod common;

use ckpt_snapshot::codec::{Codec, Compression, Key};
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use common::manifest;
use common::memory::{Judged, Memory, When};
use common::small::{Parts, content, file, holds, save, store, store_with};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

static GO_ON: AtomicBool = AtomicBool::new(false);

fn remove(store: &dyn Store, sequence: u64) {
    store.remove(&manifest(sequence).id).unwrap();
}

fn bytes(memory: &Memory) -> u64 {
    memory.objects().iter().filter(|(name, _)| name.ends_with(".pack")).map(|(_, one)| one.len() as u64).sum()
}

#[test]
fn packs_without_live_chunks_are_deleted() {
    let memory = Memory::default();
    let store = store(memory.clone());
    save(&store, 1, &[1, 2, 3]).unwrap();
    save(&store, 2, &[4, 5, 6]).unwrap();
    assert_eq!(store.reclaim().unwrap(), Reclaimed::default());
    remove(&store, 1);
    let before = bytes(&memory);
    let done = store.reclaim().unwrap();
    assert_eq!(done, Reclaimed { freed_bytes: before - bytes(&memory), moved_bytes: 0 });
    assert!(done.freed_bytes > 3000, "{done:?}");
    assert_eq!(memory.names(".pack").len(), 1);
    assert_eq!(memory.names(".index").len(), 1);
    holds(&store, 2, &[4, 5, 6]).unwrap();
    // Deleted chunks are no longer in the index.
    save(&store, 3, &[1, 2, 4]).unwrap();
    holds(&common::small::store(memory), 3, &[1, 2, 4]).unwrap();
}

#[test]
fn packs_that_are_half_used_are_copied_over() {
    let memory = Memory::default();
    let store = store(memory.clone());
    save(&store, 1, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).unwrap();
    save(&store, 2, &[1, 3, 5]).unwrap();
    let old = memory.names(".pack");
    assert_eq!(old.len(), 1, "the second one brought nothing");
    remove(&store, 1);
    let done = store.reclaim().unwrap();
    assert_eq!(done.moved_bytes, 3000);
    assert!(memory.names(".pack").len() == 1 && memory.names(".pack") != old);
    holds(&store, 2, &[1, 3, 5]).unwrap();
    holds(&common::small::store(memory), 2, &[1, 3, 5]).unwrap();
    assert_eq!(store.reclaim().unwrap(), Reclaimed::default(), "there is nothing more to do");
}

fn parts(number: u64) -> Vec<u64> {
    (10 * number..10 * number + 10).collect()
}

/// Ten packs of ten parts each, of which the snapshots 101 to 110 need two. Returns who has written them.
fn ten_used_in_part(memory: &Memory) -> PackStore {
    let writer = store(memory.clone());
    for number in 1..=10 {
        save(&writer, number, &parts(number)).unwrap();
        save(&writer, 100 + number, &parts(number)[..2]).unwrap();
    }
    (1..=10).for_each(|number| remove(&writer, number));
    writer
}

#[test]
fn a_disk_that_is_almost_full_gets_emptier() {
    let memory = Memory::default();
    let writer = ten_used_in_part(&memory);
    assert_eq!(memory.names(".pack").len(), 10);
    // Room for two copies of one pack's remains, but not of all.
    let done = store(memory.with_free_bytes(5000)).reclaim().unwrap();
    assert_eq!(done.moved_bytes, 20_000, "{done:?}");
    assert!(bytes(&memory) < 30_000, "{} bytes are left", bytes(&memory));
    for number in 1..=10 {
        holds(&store(memory.clone()), 100 + number, &parts(number)[..2]).unwrap();
    }
    // Nothing fits at all.
    save(&writer, 200, &parts(50)).unwrap();
    save(&writer, 201, &parts(50)[..4]).unwrap();
    remove(&writer, 200);
    assert_eq!(store(memory.with_free_bytes(7000)).reclaim().unwrap().moved_bytes, 0);
    assert_eq!(store(memory.with_free_bytes(8000)).reclaim().unwrap().moved_bytes, 4000);
    holds(&store(memory), 201, &parts(50)[..4]).unwrap();
}

#[test]
fn a_cancelled_collection_is_continued_by_the_next_one() {
    let memory = Memory::default();
    ten_used_in_part(&memory);
    // Cancelled from the first copied chunk on.
    let cancel = Arc::new(AtomicBool::new(false));
    let its = Arc::clone(&cancel);
    let medium = Judged::new(memory.clone(), move |_, kind, name| {
        its.fetch_or(kind == "open" && name.ends_with(".pack"), Ordering::SeqCst);
        Ok(())
    });
    let done = store(medium).reclaim_until(&cancel).unwrap();
    assert!(cancel.load(Ordering::SeqCst));
    assert_eq!(done.moved_bytes, 2000, "one pack's remains");
    assert_eq!(memory.names(".pack").len(), 10, "nine, and the new one");
    let done = store(memory.clone()).reclaim().unwrap();
    assert_eq!(done.moved_bytes, 20_000 - 2000, "what was copied before is not copied again");
    for number in 1..=10 {
        holds(&store(memory.clone()), 100 + number, &parts(number)[..2]).unwrap();
    }
}

#[test]
fn a_reader_with_old_indexes_finds_moved_chunks() {
    let memory = Memory::default();
    let (launcher, other) = (store(memory.clone()), store(memory));
    save(&launcher, 1, &[1, 2, 3, 4, 5, 6, 7]).unwrap();
    let second = save(&launcher, 2, &[1, 3]).unwrap();
    holds(&other, 2, &[1, 3]).unwrap();
    remove(&launcher, 1);
    assert_ne!(launcher.reclaim().unwrap(), Reclaimed::default());
    let mut read = vec![0; 2000];
    other.source(&second, &file()).unwrap().read_at(0, &mut read).unwrap();
    assert_eq!(read, content(&[1, 3]));
    holds(&other, 2, &[1, 3]).unwrap();
}

#[test]
fn many_small_packs_become_one() {
    let memory = Memory::default();
    let store = store(memory.clone());
    for number in 1..=32 {
        save(&store, number, &[0, number]).unwrap();
    }
    assert_eq!(store.reclaim().unwrap(), Reclaimed::default(), "not so many yet");
    save(&store, 33, &[0, 33]).unwrap();
    assert_eq!(store.reclaim().unwrap().moved_bytes, 34_000);
    assert_eq!(memory.names(".pack").len(), 1);
    for number in 1..=33 {
        holds(&store, number, &[0, number]).unwrap();
    }
}

#[test]
fn what_a_save_finds_known_stays() {
    let memory = Memory::default();
    let (sender, receiver) = mpsc::channel();
    let sender = Mutex::new(sender);
    let is_armed = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&is_armed);
    let medium = Judged::new(memory.clone(), move |when, kind, name| {
        if armed.load(Ordering::SeqCst) && (when, kind, name) == (When::After, "list", "packs") {
            sender.lock().unwrap().send(()).unwrap();
        }
        Ok(())
    });
    let store = store(medium);
    save(&store, 1, &[1, 2, 3]).unwrap();
    save(&store, 2, &[4]).unwrap();
    remove(&store, 1);
    // Nobody needs 1, 2 and 3 now, and they are still there.
    let content = content(&[1, 2]);
    let mut writer = store.begin(&manifest(3).id, 100).unwrap();
    writer.put(&[Input { path: file(), from: &Parts(&content) }], &|_| {}).unwrap();
    is_armed.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let reclaiming = scope.spawn(|| store.reclaim().unwrap());
        // It has looked at the snapshots by now.
        receiver.recv().unwrap();
        is_armed.store(false, Ordering::SeqCst);
        writer.commit(manifest(3)).unwrap();
        reclaiming.join().unwrap();
    });
    for store in [&store, &common::small::store(memory)] {
        holds(store, 3, &[1, 2]).unwrap();
        holds(store, 2, &[4]).unwrap();
    }
}

#[test]
fn what_is_committed_while_the_indexes_are_read_stays_known() {
    let memory = Memory::default();
    let (sender, receiver) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let ends = Mutex::new((sender, released));
    let is_armed = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&is_armed);
    let medium = Judged::new(memory.clone(), move |when, kind, name| {
        if (when, kind, name) == (When::After, "list", "packs") && armed.swap(false, Ordering::SeqCst) {
            let ends = ends.lock().unwrap();
            ends.0.send(()).unwrap();
            ends.1.recv().unwrap();
        }
        Ok(())
    });
    let store = store(medium);
    save(&store, 1, &[1]).unwrap();
    let content = content(&[1, 2, 3]);
    let mut writer = store.begin(&manifest(2).id, 100).unwrap();
    writer.put(&[Input { path: file(), from: &Parts(&content) }], &|_| {}).unwrap();
    is_armed.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let reclaiming = scope.spawn(|| store.reclaim().unwrap());
        // It has listed the packs, and reads them when the snapshot is there.
        receiver.recv().unwrap();
        writer.commit(manifest(2)).unwrap();
        release.send(()).unwrap();
        reclaiming.join().unwrap();
    });
    assert_eq!(save(&store, 3, &[1, 2, 3]).unwrap().stored_bytes, Some(0), "all of it is there");
}

#[test]
fn a_load_looks_once_for_what_was_moved() {
    let memory = Memory::default();
    let lists = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&lists);
    let medium = Judged::new(memory.clone(), move |when, kind, name| {
        if (when, kind, name) == (When::Before, "list", "packs") {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    });
    let (launcher, other) = (store(memory), store(medium));
    let parts: Vec<u64> = (1..=40).collect();
    save(&launcher, 1, &parts).unwrap();
    save(&launcher, 2, &parts[..9]).unwrap();
    holds(&other, 2, &parts[..9]).unwrap();
    remove(&launcher, 1);
    assert!(launcher.reclaim().unwrap().moved_bytes > 0);
    let before = lists.load(Ordering::SeqCst);
    holds(&other, 2, &parts[..9]).unwrap();
    assert_eq!(lists.load(Ordering::SeqCst) - before, 1);
}

/// The second time is between the reading of the indexes and that of the chunk.
#[test]
fn a_load_finds_what_is_moved_twice() {
    let memory = Memory::default();
    let launcher = Arc::new(store(memory.clone()));
    let (opened, moving) = (AtomicU64::new(0), Arc::clone(&launcher));
    let medium = Judged::new(memory, move |when, kind, name| {
        let is_pack = (when, kind) == (When::Before, "open") && name.ends_with(".pack");
        // The first one, of the first load; then the one that is gone, and the one to which its chunks were moved.
        if is_pack && opened.fetch_add(1, Ordering::SeqCst) == 2 {
            remove(&*moving, 2);
            assert!(moving.reclaim().unwrap().moved_bytes > 0);
        }
        Ok(())
    });
    let other = store(medium);
    let parts: Vec<u64> = (1..=40).collect();
    for (number, parts) in [(1, &parts[..]), (2, &parts[..9]), (3, &parts[..3])] {
        save(&*launcher, number, parts).unwrap();
    }
    holds(&other, 3, &parts[..3]).unwrap();
    remove(&*launcher, 1);
    assert!(launcher.reclaim().unwrap().moved_bytes > 0);
    holds(&other, 3, &parts[..3]).unwrap();
}

#[test]
fn an_index_of_a_newer_version_is_refused() {
    let memory = Memory::default();
    save(&store(memory.clone()), 1, &[1, 2]).unwrap();
    let index = memory.names(".index").pop().unwrap();
    let mut newer = memory.objects()[&index].to_vec();
    newer[8] = 2;
    // And so is its copy, before the 16 bytes at the end of the pack.
    let pack = index.replace(".index", ".pack");
    let mut with_copy = memory.objects()[&pack].to_vec();
    let copy = with_copy.len() - 16 - newer.len();
    with_copy[copy + 8] = 2;
    memory.set(&pack, with_copy);
    memory.set(&index, newer);
    let store = store(memory.clone());
    let read = (&store as &dyn Store).read(&store.manifest(&manifest(1).id).unwrap(), &file());
    assert!(matches!(read, Err(ReadError::NewerObject { found: 2, known: 1, .. })), "{read:?}");
    assert!(matches!(save(&store, 2, &[1]), Err(SaveError::Store(ReadError::NewerObject { .. }))));
    assert!(matches!(store.reclaim(), Err(SaveError::Store(ReadError::NewerObject { .. }))));
    assert!(matches!(store.scrub(1.0, &|_| {}, &GO_ON), Err(ReadError::NewerObject { .. })));
    assert_eq!(memory.names(".pack").len(), 1);
}

#[test]
fn what_was_given_up_is_not_built_upon() {
    let memory = Memory::default();
    let fails = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&fails);
    let medium = Judged::new(memory.clone(), move |_, kind, name| {
        let fails = armed.load(Ordering::SeqCst) && kind == "put" && name.starts_with("manifests/");
        if fails { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    });
    let store = store(medium);
    save(&store, 1, &[1]).unwrap();
    fails.store(true, Ordering::SeqCst);
    save(&store, 2, &[1, 2]).unwrap_err();
    fails.store(false, Ordering::SeqCst);
    save(&store, 3, &[1, 2]).unwrap();
    holds(&common::small::store(memory), 3, &[1, 2]).unwrap();
}

#[test]
fn nothing_goes_when_a_snapshot_cannot_be_read() {
    let memory = Memory::default();
    let fails = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&fails);
    let medium = Judged::new(memory.clone(), move |_, kind, name| {
        let fails = armed.load(Ordering::SeqCst) && kind == "read" && name.starts_with("manifests/000002");
        if fails { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    });
    let store = store(medium);
    for number in 1..=3 {
        save(&store, number, &[number]).unwrap();
    }
    remove(&store, 1);
    fails.store(true, Ordering::SeqCst);
    store.reclaim().unwrap_err();
    assert_eq!(memory.names(".pack").len(), 3);
    fails.store(false, Ordering::SeqCst);
    store.reclaim().unwrap();
    assert_eq!(memory.names(".pack").len(), 2);
    // One that is damaged is lost, with what only it needed.
    memory.flip(&format!("manifests/{}", manifest(2).id), 40);
    store.reclaim().unwrap();
    assert_eq!(memory.names(".pack").len(), 1);
    holds(&store, 3, &[3]).unwrap();
}

#[test]
fn packs_are_not_all_open_at_once() {
    let memory = Memory::default();
    let parts: Vec<u64> = (1..=150).collect();
    for part in &parts {
        save(&store(memory.clone()), *part, &[*part]).unwrap();
    }
    save(&store(memory.clone()), 200, &parts).unwrap();
    assert_eq!(memory.names(".pack").len(), 150);
    let limit = Arc::new(AtomicU64::new(u64::MAX));
    let left = Arc::clone(&limit);
    let medium = Judged::new(memory, move |_, kind, name| {
        let opens = kind == "open" && name.ends_with(".pack");
        // All descriptors are in use.
        let take = |left: u64| left.checked_sub(1);
        let fails = opens && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_err();
        if fails { Err(io::Error::from_raw_os_error(24)) } else { Ok(()) }
    });
    let store = store_with(medium.clone(), 4);
    holds(&store, 200, &parts).unwrap();
    let scrubbed = store.scrub(1.0, &|_| {}, &GO_ON).unwrap();
    assert!(scrubbed.damage.is_empty() && scrubbed.packs == 150, "{scrubbed:?}");
    assert!(medium.most_open() < 64 + 10, "{}", medium.most_open());

    for number in [0, 100, 149, 200] {
        limit.store(number, Ordering::SeqCst);
        let scrubbed = store.scrub(1.0, &|_| {}, &GO_ON);
        assert!(matches!(scrubbed, Err(ReadError::Io { .. })), "that is no damage: {scrubbed:?}");
    }
    limit.store(100, Ordering::SeqCst);
    let read = store.verify(&store.manifest(&manifest(200).id).unwrap(), &|_| {});
    assert!(matches!(read, Err(ReadError::Io { .. })), "nor is this: {read:?}");
}

/// A store whose disk cannot read what is in the list.
fn with_bad_sectors(memory: &Memory) -> (PackStore, Arc<Mutex<Vec<String>>>) {
    let bad = Arc::new(Mutex::new(Vec::<String>::new()));
    let names = Arc::clone(&bad);
    let medium = Judged::new(memory.clone(), move |_, kind, name| {
        let is_bad = kind == "read" && names.lock().unwrap().iter().any(|bad| bad == name);
        if is_bad { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    });
    (store(medium), bad)
}

#[test]
fn an_index_that_cannot_be_read_stops_nothing() {
    let memory = Memory::default();
    let first = store(memory.clone());
    for number in 1..=3 {
        save(&first, number, &[number, number + 10]).unwrap();
    }
    remove(&first, 1);
    let index_of = |part| find(&memory, part).pop().unwrap().0.replace(".pack", ".index");
    for part in [1, 2] {
        let (store, bad) = with_bad_sectors(&memory);
        let (dead, index) = (find(&memory, 1), index_of(part));
        // Nor can its copy in the pack.
        bad.lock().unwrap().extend([index.clone(), index.replace(".index", ".pack")]);
        holds(&store, 3, &[3, 13]).unwrap();
        save(&store, 10 + part, &[3, 100 + part]).unwrap();
        if part == 1 {
            store.reclaim().unwrap();
            assert!(!dead.is_empty() && find(&memory, 1) == dead, "nothing goes because of it");
        } else {
            holds(&store, 2, &[2, 12]).unwrap_err();
            store.reclaim().unwrap();
        }
        bad.lock().unwrap().clear();
        holds(&common::small::store(memory.clone()), 2, &[2, 12]).unwrap();
    }
}

#[test]
fn a_manifest_that_cannot_be_read_is_passed_over_and_not_given_up() {
    let memory = Memory::default();
    let (store, bad) = with_bad_sectors(&memory);
    for number in 1..=3 {
        save(&store, number, &[number]).unwrap();
    }
    remove(&store, 3);
    bad.lock().unwrap().push(format!("manifests/{}", manifest(1).id));
    let read = store.manifest(&manifest(1).id);
    assert!(matches!(read, Err(ReadError::Damaged { .. })), "an older one is tried: {read:?}");
    let listed = store.list().unwrap();
    assert_eq!(listed.len(), 2);
    assert!(
        choose_prunable(&listed, &Retention::newest(1), &Marks::default(), &History::default()).is_empty()
    );
    store.reclaim().unwrap_err();
    assert_eq!(memory.names(".pack").len(), 3);
    bad.lock().unwrap().clear();
    store.reclaim().unwrap();
    assert_eq!(memory.names(".pack").len(), 2);
    holds(&store, 1, &[1]).unwrap();
}

#[test]
fn chunks_that_cannot_be_read_anywhere_stay_everywhere() {
    let memory = Memory::default();
    let first = store(memory.clone());
    save(&first, 1, &[1, 2, 3, 4, 5]).unwrap();
    let saved = memory.objects();
    let index = memory.names(".index").pop().unwrap();
    memory.unset(&index);
    save(&store(memory.clone()), 2, &[1, 2, 3, 4, 5]).unwrap();
    memory.set(&index, saved[&index].to_vec());
    let packs = memory.names(".pack");
    let (store, bad) = with_bad_sectors(&memory);
    bad.lock().unwrap().clone_from(&packs);
    for _ in 0..2 {
        store.reclaim().unwrap();
        assert_eq!(memory.names(".pack"), packs);
    }
    bad.lock().unwrap().remove(0);
    store.reclaim().unwrap();
    holds(&store, 1, &[1, 2, 3, 4, 5]).unwrap();
}

/// Where the chunk lies: (pack, offset).
fn find(memory: &Memory, part: u64) -> Vec<(String, usize)> {
    let (content, mut found) = (content(&[part]), Vec::new());
    for (name, object) in memory.objects() {
        let at = object.windows(content.len()).position(|window| window == content);
        found.extend(at.map(|at| (name, at)));
    }
    found
}

#[test]
fn damage_is_made_good_by_the_next_save_that_has_the_chunk() {
    let memory = Memory::default();
    let scrubbed = store(memory.clone());
    let parts: Vec<u64> = (1..=10).collect();
    save(&scrubbed, 1, &parts).unwrap();
    let (pack, at) = find(&memory, 5).pop().unwrap();
    memory.flip(&pack, at + 7);
    let found = scrubbed.scrub(1.0, &|_| {}, &GO_ON).unwrap();
    assert_eq!(found.damage.len(), 2, "the pack and the snapshot: {found:?}");
    holds(&scrubbed, 1, &parts).unwrap_err();
    save(&scrubbed, 2, &parts).unwrap();
    holds(&scrubbed, 1, &parts).unwrap();

    // Another process finds both, in whichever order.
    let other = store(memory.clone());
    holds(&other, 1, &parts).unwrap();
    holds(&store(memory.clone()), 2, &parts).unwrap();
    let done = store(memory.clone()).reclaim().unwrap();
    assert!(done.moved_bytes >= 9000, "the pack with the damage is rewritten: {done:?}");
    let healed = store(memory);
    assert!(healed.scrub(1.0, &|_| {}, &GO_ON).unwrap().damage.is_empty());
    holds(&healed, 1, &parts).unwrap();
}

#[test]
fn damage_without_another_copy_is_kept_for_inspection() {
    let memory = Memory::default();
    let first = store(memory.clone());
    save(&first, 1, &[1, 2, 3, 4, 5, 6, 7]).unwrap();
    save(&first, 2, &[1, 2]).unwrap();
    remove(&first, 1);
    let (pack, at) = find(&memory, 2).pop().unwrap();
    memory.flip(&pack, at);
    for _ in 0..3 {
        store(memory.clone()).reclaim().unwrap();
        assert!(memory.names(".pack").contains(&pack));
    }
    assert!(memory.names(".pack").len() <= 2);
    memory.flip(&pack, at);
    holds(&store(memory), 2, &[1, 2]).unwrap();
}

#[test]
fn a_pack_that_cannot_go_is_not_copied_each_time() {
    let memory = Memory::default();
    let store = store(memory.clone());
    save(&store, 1, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    save(&store, 2, &[1, 2, 3]).unwrap();
    remove(&store, 1);
    let (pack, at) = find(&memory, 3).pop().unwrap();
    memory.flip(&pack, at);
    store.reclaim().unwrap();
    for _ in 0..2 {
        assert_eq!(store.reclaim().unwrap().moved_bytes, 0);
        assert!(memory.names(".pack").contains(&pack));
    }
    // Once it is made good, it goes.
    save(&store, 3, &[1, 2, 3]).unwrap();
    store.reclaim().unwrap();
    assert!(!memory.names(".pack").contains(&pack));
    holds(&common::small::store(memory), 2, &[1, 2, 3]).unwrap();
}

#[test]
fn packs_without_an_index_are_swept() {
    let memory = Memory::default();
    let store = store(memory.clone());
    save(&store, 1, &[1]).unwrap();
    let stray = format!("packs/{:032x}.pack", 7);
    memory.set(&stray, vec![0; 100]);
    memory.set("packs/README", vec![0; 100]);
    assert_eq!(store.sweep().unwrap(), [stray]);
    assert!(store.sweep().unwrap().is_empty());
    assert_eq!(memory.names("README").len(), 1, "it is not ours");
    holds(&store, 1, &[1]).unwrap();
}

#[test]
fn nothing_is_built_on_a_pack_that_is_gone_or_cut_short() {
    for cut in [true, false] {
        let memory = Memory::default();
        save(&store(memory.clone()), 1, &[1, 2]).unwrap();
        let pack = memory.names(".pack").pop().unwrap();
        if cut {
            memory.set(&pack, memory.objects()[&pack][..1500].to_vec());
        } else {
            memory.unset(&pack);
        }
        let next = store(memory.clone());
        holds(&next, 1, &[1, 2]).unwrap_err();
        save(&next, 2, &[1, 2, 3]).unwrap();
        holds(&store(memory.clone()), 2, &[1, 2, 3]).unwrap();
        holds(&store(memory.clone()), 1, &[1, 2]).unwrap();
        store(memory.clone()).reclaim().unwrap();
        holds(&store(memory), 1, &[1, 2]).unwrap();
    }
}

#[test]
fn a_copy_between_packed_stores_reads_only_what_is_missing() {
    let (near, far) = (Memory::default(), Memory::default());
    let read = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&read);
    let medium = Judged::new(near, move |_, kind, name| {
        if kind == "read" && name.ends_with(".pack") {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    });
    let tiers = Tiers::new(vec![
        Tier::new("disk", Box::new(store_with(medium, 2)), true),
        Tier::new("remote", Box::new(store_with(far.clone(), 2)), true),
    ]);
    let parts: Vec<u64> = (1..=20).collect();
    save(&tiers, 1, &parts).unwrap();
    save(&tiers, 2, &[&parts[..], &[21, 22]].concat()).unwrap();
    tiers.copy(&manifest(1).id, "disk", "remote", &|_| {}, &GO_ON).unwrap();
    assert_eq!(read.load(Ordering::SeqCst), 20);
    tiers.copy(&manifest(2).id, "disk", "remote", &|_| {}, &GO_ON).unwrap();
    assert_eq!(read.load(Ordering::SeqCst), 22);
    holds(&store(far.clone()), 2, &[&parts[..], &[21, 22]].concat()).unwrap();
    holds(&store(far), 1, &parts).unwrap();
}

#[test]
fn a_source_gives_any_part_of_its_file() {
    let memory = Memory::default();
    let store = store(memory.clone());
    let saved = save(&store, 1, &[1, 2, 3]).unwrap();
    let whole = content(&[1, 2, 3]);
    let source = store.source(&saved, &saved.files[0].path).unwrap();
    assert_eq!((source.chunk_end(0), source.chunk_end(999), source.chunk_end(1000)), (1000, 1000, 2000));
    assert_eq!(source.known(1000..2000), Some(saved.files[0].chunks[1].id));
    assert_eq!(source.known(1000..1999), None);
    for (begin, end) in [(0, 3000), (0, 1000), (1, 2), (999, 1001), (500, 2500), (2000, 3000)] {
        let mut part = vec![0; end - begin];
        source.read_at(begin as u64, &mut part).unwrap();
        assert!(part == whole[begin..end], "{begin}..{end}");
    }
    drop(source);
    let pack = memory.names(".pack").pop().unwrap();
    let at = find(&memory, 2).pop().unwrap().1;
    memory.flip(&pack, at);
    let (source, mut part) = (store.source(&saved, &saved.files[0].path).unwrap(), vec![0; 1000]);
    assert!(source.read_at(1000, &mut part).is_err(), "damage is not handed on");
}

#[test]
fn what_is_copied_over_is_encrypted_anew() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, (1..33).collect::<Vec<u8>>()).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let codec = Codec::new(Compression::Auto, Some(&Key::from_file(&file).unwrap()));
    let memory = Memory::default();
    // One pack, of which less than half is needed.
    let limits = Limits { workers: 1, loaders: 1, ..Limits::default() };
    let open = || PackStore::new(Arc::new(memory.clone()), codec.clone(), limits);
    let parts: Vec<u64> = (1..=40).collect();
    save(&open(), 1, &parts).unwrap();
    save(&open(), 2, &[1, 20, 40]).unwrap();
    remove(&open(), 1);
    let store = open();
    assert!(store.reclaim().unwrap().moved_bytes > 3000);
    holds(&store, 2, &[1, 20, 40]).unwrap();
    holds(&open(), 2, &[1, 20, 40]).unwrap();
    assert!(open().scrub(1.0, &|_| {}, &GO_ON).unwrap().damage.is_empty());
    assert!(find(&memory, 20).is_empty(), "nobody can read it");
    let without = common::small::store(memory.clone());
    assert!(without.reclaim().is_err(), "nobody without the key takes anything away");
    holds(&open(), 2, &[1, 20, 40]).unwrap();
}
