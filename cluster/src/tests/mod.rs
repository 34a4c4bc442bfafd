//! Whole clusters: the real state machines over simulated nodes, messages, clocks and a simulated store.

mod exhaustive;
mod host;
mod simulation;
mod units;
mod world;
