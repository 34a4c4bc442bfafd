//! Snapshots in every kind of store: written, damaged, uploaded, shared, kept in memory and read back.
//!
//! Each folder in `tests/tests` is one test program: linking takes time, and tests of one program run in parallel.

mod cgroups;
mod damage;
mod faults;
mod forged;
mod keeper;
mod machines;
mod memory;
mod nfs;
mod partitions;
mod plain_text;
mod power_loss;
mod reader;
mod releases;
mod silent;
mod stores;

#[path = "../../src/threads.rs"]
mod threads;
