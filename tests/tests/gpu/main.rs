//! Programs that use a GPU, on a simulated one.
//!
//! Each folder in `tests/tests` is one test program: linking takes time, and tests of one program run in parallel.

mod bundle;
mod chaos;
mod clients;
mod faults;
mod faulty_job;
mod gpu_job;
mod jobs;
mod mirror;
mod nccl;
mod nvidia;
mod placement;
mod resume_hangs;
mod unwritten;

#[path = "../../src/threads.rs"]
mod threads;
