//! The messages between the parts of ckpt-run, and the one codec that carries them.
//!
//! Two kinds of peers talk to the launcher over unix stream sockets: the agents in the job's processes
//! ([`agent`]) and the commands that ask a running launcher for something ([`control`]). Both speak JSON
//! behind a length ([`frame`]). Agents and launcher also pass each other open files ([`descriptors`]).

#![forbid(unsafe_code)]

pub mod agent;
pub mod control;
pub mod descriptors;
pub mod frame;
