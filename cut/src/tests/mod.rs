//! Whole jobs: the real clocks and the real coordinator under simulated ranks, messages and schedules.

mod exhaustive;
mod program;
mod random;
mod simulation;
mod units;
