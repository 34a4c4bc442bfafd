//! `cargo +nightly fuzz run manifest_v1`: see `entries.rs`.

#![no_main]

#[path = "../entries.rs"]
#[allow(dead_code)]
mod entries;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entries::manifest_v1(bytes));
