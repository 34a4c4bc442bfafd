//! One checkpoint of a running job.

pub mod attempt;
pub mod diagnose;
pub mod dump;
#[cfg(feature = "faults")]
pub mod injected;
