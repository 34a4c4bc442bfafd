//! Whole jobs under ckpt-run: saved, killed, restarted, preempted and resumed, in the environments that users have.
//!
//! Each folder in `tests/tests` is one test program: linking takes time, and tests of one program run in parallel.

mod adversary;
mod agents;
mod completions;
mod container;
mod demo;
mod distribution_kernel;
mod entrypoint;
mod files;
mod full;
mod hangs;
mod installed;
mod launcher;
mod misled;
mod nodes;
mod notified;
mod privileges;
mod refused;
mod report;
mod resources;
mod slurm;
mod soak;
mod supervisor;
mod system_calls;
mod training;
mod unkillable;
mod watched;
mod zdtm;

#[path = "../../src/threads.rs"]
mod threads;
