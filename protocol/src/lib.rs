//! The messages between the parts of ckpt-run, and their codec.
//!
//! Two kinds of peers connect to the launcher over unix stream sockets: the agents in the job's processes
//! ([`agent`]), and commands such as `ckpt-run status` ([`control`]). Both send length-prefixed JSON ([`frame`]).
//! Agents and launcher also pass each other file descriptors ([`descriptors`]).

#![forbid(unsafe_code)]

pub mod agent;
pub mod control;
pub mod descriptors;
pub mod devices;
pub mod frame;
