//! A scrub finds what snapshots lack, and repair writes lost indexes again.

mod common;

use ckpt_snapshot::codec::{Codec, Compression, Key};
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use common::memory::Memory;
use common::small::{content, holds, save, store};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

static GO_ON: AtomicBool = AtomicBool::new(false);

fn damage(store: &PackStore) -> Vec<String> {
    let found = store.scrub(1.0, &|_| {}, &GO_ON).unwrap();
    found.damage.iter().map(ToString::to_string).collect()
}

/// Two snapshots, each with a pack of its own; the names of the packs, that of the first snapshot first.
fn two() -> (Memory, [String; 2]) {
    let memory = Memory::default();
    save(&store(memory.clone()), 1, &[1, 2, 3]).unwrap();
    let first = memory.names(".pack").pop().unwrap();
    save(&store(memory.clone()), 2, &[1, 4, 5, 6]).unwrap();
    let second = memory.names(".pack").into_iter().find(|name| *name != first).unwrap();
    (memory, [first, second])
}

fn index_of(pack: &str) -> String {
    pack.replace(".pack", ".index")
}

#[test]
fn a_scrub_names_the_snapshots_that_lack_chunks() {
    for what in ["the pack", "the index", "both", "a chunk"] {
        let (memory, [first, _]) = two();
        if matches!(what, "the pack" | "both") {
            memory.unset(&first);
        }
        if matches!(what, "the index" | "both") {
            memory.unset(&index_of(&first));
        }
        if what == "a chunk" {
            let at = memory.objects()[&first].windows(1000).position(|part| part == content(&[2])).unwrap();
            memory.flip(&first, at);
        }
        let damage = damage(&store(memory));
        let of_snapshots: Vec<_> =
            damage.iter().filter(|line| line.contains("of the snapshot's chunks")).collect();
        // The second snapshot shares only the chunk 1.
        let expected = if what == "a chunk" { 1 } else { 2 };
        assert_eq!(of_snapshots.len(), expected, "{what}: {damage:?}");
        assert!(of_snapshots[0].contains("manifests/000001-"), "{what}: {damage:?}");
    }
}

#[test]
fn lost_and_damaged_indexes_are_written_again() {
    let (memory, [first, second]) = two();
    let before = memory.objects();
    memory.unset(&index_of(&first));
    memory.flip(&index_of(&second), 77);
    let broken = store(memory.clone());
    holds(&broken, 1, &[1, 2, 3]).unwrap_err();
    // A damaged index is read from its copy, whichever byte is wrong.
    memory.set(&index_of(&first), before[&index_of(&first)].to_vec());
    for at in 0..before[&index_of(&first)].len() {
        memory.flip(&index_of(&first), at);
        holds(&store(memory.clone()), 1, &[1, 2, 3]).unwrap();
        assert_eq!(store(memory.clone()).repair().unwrap().packs.len(), 2, "byte {at}");
        assert!(memory.objects() == before, "byte {at}");
        memory.flip(&index_of(&second), 77);
    }
    memory.flip(&index_of(&first), 77);
    let found = damage(&store(memory.clone()));
    assert!(found.len() == 2 && found.iter().all(|line| line.contains("checksum")), "{found:?}");
    for (number, content) in [(1, &[1, 2, 3][..]), (2, &[1, 4, 5, 6])] {
        holds(&store(memory.clone()), number, content).unwrap();
    }
    memory.unset(&index_of(&first));
    // The next start of the job does not take the pack for the leftover of an interrupted save.
    broken.sweep().unwrap();
    let repaired = broken.repair().unwrap();
    assert_eq!((repaired.packs.len(), repaired.unusable.len()), (2, 0), "{repaired:?}");
    assert_eq!(memory.objects(), before);
    for healed in [broken, store(memory.clone())] {
        holds(&healed, 1, &[1, 2, 3]).unwrap();
        holds(&healed, 2, &[1, 4, 5, 6]).unwrap();
        assert_eq!(damage(&healed), [""; 0]);
        assert!(healed.repair().unwrap().packs.is_empty(), "nothing is left to do");
    }
}

#[test]
fn a_pack_without_a_whole_copy_of_its_index_is_named_and_left_alone() {
    let (memory, [first, second]) = two();
    for pack in [&first, &second] {
        memory.unset(&index_of(pack));
    }
    let whole = memory.objects()[&first].len();
    memory.flip(&first, whole - 100);
    // As a pack of an older build, and one that was cut.
    let cut = memory.objects()[&second][..3000].to_vec();
    memory.set(&second, cut);
    let before = memory.objects();
    let repaired = store(memory.clone()).repair().unwrap();
    assert_eq!((repaired.packs.len(), repaired.unusable.len()), (0, 2), "{repaired:?}");
    assert_eq!(memory.objects(), before);
}

/// What an interrupted save leaves is removed as long as no snapshot lacks anything.
#[test]
fn a_pack_without_an_index_that_nobody_needs_is_swept() {
    let (memory, [first, _]) = two();
    let garbage = memory.objects()[&first].to_vec();
    memory.set("packs/00000000000000000000000000000001.pack", garbage);
    assert_eq!(store(memory.clone()).sweep().unwrap(), ["packs/00000000000000000000000000000001.pack"]);
    assert_eq!(damage(&store(memory)), [""; 0]);
}

#[test]
fn an_encrypted_index_is_written_again_with_the_key_only() {
    let (memory, dir) = (Memory::default(), tempfile::tempdir().unwrap());
    let open = |number: u8| {
        let file = dir.path().join(number.to_string());
        std::fs::write(&file, std::array::from_fn::<u8, 32, _>(|at| at as u8 ^ number)).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let codec = Codec::new(Compression::Auto, Some(&Key::from_file(&file).unwrap()));
        PackStore::new(
            Arc::new(memory.clone()),
            codec,
            Limits { workers: 1, loaders: 1, ..Limits::default() },
        )
    };
    save(&open(1), 1, &[1, 2, 3]).unwrap();
    memory.unset(&memory.names(".index").pop().unwrap());
    let stranger = open(2).repair().unwrap();
    assert_eq!((stranger.packs.len(), stranger.unusable.len()), (0, 1), "{stranger:?}");
    assert_eq!(open(1).repair().unwrap().packs.len(), 1);
    holds(&open(1), 1, &[1, 2, 3]).unwrap();
}

#[test]
fn a_share_of_the_data_is_read_and_all_else_is_checked() {
    let memory = Memory::default();
    let large = common::noise(1, 200 << 20);
    let all = store(memory.clone());
    common::save(&all, 1, &[("gpu/1.mem", &large)]).unwrap();
    let found = all.scrub(0.2, &|_| {}, &GO_ON).unwrap();
    assert!(found.read_bytes > 0 && found.read_bytes < found.pack_bytes / 2, "{found:?}");
    memory.names(".index").into_iter().take(1).for_each(|name| memory.unset(&name));
    assert!(!store(memory).scrub(0.01, &|_| {}, &GO_ON).unwrap().damage.is_empty());
}
