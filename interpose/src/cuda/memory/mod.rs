//! Device memory.
//!
//! | module | does |
//! |---|---|
//! | `physical` | each piece of physical memory, where it is mapped, who may access it |
//! | `layout` | structures that programs pass |
//! | `ipc` | memory of one process in another |

#![allow(dead_code, reason = "TEMPORARY: its users are being written")]

pub(in crate::cuda) mod ipc;
pub(in crate::cuda) mod layout;
pub(in crate::cuda) mod physical;
