//! Nothing is left behind, however long a program runs.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng};

use super::vmm::{create, map, release, reserve, set_access, unmap};
use super::*;

/// So many mappings the process's own allocator may add meanwhile; a leak makes thousands.
const ALLOCATOR_MAPPINGS: usize = 64;

/// This process's mappings, and how many of them are of segments.
fn mappings() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (maps.lines().count(), maps.lines().filter(|line| line.contains("/segment-")).count())
}

fn random() -> TestRng {
    TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32])
}

#[test]
fn a_million_allocations_leave_nothing() {
    if !is_own_process("memory::tests::leaks::a_million_allocations_leave_nothing", &[]) {
        return;
    }
    let _context = context();
    let mut random = random();
    let start = free_bytes();
    let mut before = (0, 0);
    let mut live: Vec<u64> = Vec::new();
    for step in 0..1_000_000 {
        if step == 10_000 {
            // What the process allocates once is there by now.
            live.drain(..).for_each(|address| free(address).unwrap());
            before = mappings();
        }
        if live.is_empty() || live.len() < 2000 && random.random_bool(0.5) {
            let is_large = random.random_bool(0.01);
            let size_bytes =
                if is_large { random.random_range(MIB..4 * MIB) } else { random.random_range(1..16 * KIB) };
            live.extend(alloc(size_bytes));
        } else {
            let which = random.random_range(0..live.len());
            free(live.swap_remove(which)).unwrap();
        }
    }
    assert!(free_bytes() < start);
    live.drain(..).for_each(|address| free(address).unwrap());
    assert_eq!(free_bytes(), start);
    let after = mappings();
    assert_eq!(after.1, 0);
    assert!(after.0 < before.0 + ALLOCATOR_MAPPINGS, "{before:?} {after:?}");
}

#[test]
fn a_hundred_thousand_live_allocations() {
    if !is_own_process("memory::tests::leaks::a_hundred_thousand_live_allocations", &[]) {
        return;
    }
    let _context = context();
    let start = free_bytes();
    let live: Vec<_> = (0..100_000).map(|index| alloc(1 + index % 4096).unwrap()).collect();
    let (_, segments) = mappings();
    assert!(segments < 200, "{segments} mappings");
    assert!(live.iter().all(|address| is_accessible(*address, 1, 0)));
    live.into_iter().rev().for_each(|address| free(address).unwrap());
    assert_eq!(free_bytes(), start);
}

#[test]
fn many_mappings_leave_nothing() {
    if !is_own_process("memory::tests::leaks::many_mappings_leave_nothing", &[]) {
        return;
    }
    const PAGES: u64 = 64;
    let _context = context();
    let mut random = random();
    let start = free_bytes();
    let base = reserve(PAGES * PAGE).unwrap();
    let before = mappings();
    let mut mapped: BTreeMap<u64, u64> = BTreeMap::new();
    for _ in 0..100_000 {
        let at = base + random.random_range(0..PAGES) * PAGE;
        match mapped.remove(&at) {
            Some(handle) => {
                unmap(at, PAGE).unwrap();
                assert!(span(at, 0).is_none());
                // Some handles go before their mapping, some after.
                if handle != 0 {
                    release(handle).unwrap();
                }
            }
            None => {
                let handle = create(PAGE).unwrap();
                map(at, PAGE, handle).unwrap();
                set_access(at, PAGE, 0, 3).unwrap();
                let is_released_first = random.random_bool(0.5);
                if is_released_first {
                    release(handle).unwrap();
                }
                mapped.insert(at, if is_released_first { 0 } else { handle });
            }
        }
    }
    for (at, handle) in mapped {
        unmap(at, PAGE).unwrap();
        if handle != 0 {
            release(handle).unwrap();
        }
    }
    assert_eq!(free_bytes(), start);
    let after = mappings();
    assert_eq!(after.1, 0);
    assert!(after.0 < before.0 + ALLOCATOR_MAPPINGS, "{before:?} {after:?}");
    // SAFETY: an address is only looked up.
    assert_eq!(unsafe { cuMemAddressFree(base, (PAGES * PAGE) as usize) }, Ok(()));
}
