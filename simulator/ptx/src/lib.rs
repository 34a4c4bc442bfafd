//! PTX on the CPU: text is parsed to a [`Module`], and a [`Launch`] executes one of its kernels.
//!
//! There is no CUDA in here: the driver supplies device memory ([`Memory`]) and the addresses of the module's
//! variables ([`Image`]). A warp executes 32 lanes at once; each lane has its own program counter, as on Volta and
//! later. Anything that is not understood is a [`ParseError`] with its line; nothing is skipped silently.
//!
//! `parse` turns text into instructions (`ir`) whose arithmetic (`compute`) is already chosen, `exec`
//! executes them. [`arith`] is the arithmetic itself: pure functions on bit patterns.
//!
//! Facts about PTX are from NVIDIA's "PTX ISA" 8.7 to 9.1 unless a comment names another source.

#![deny(unsafe_code)]

pub mod arith;
mod compute;
mod error;
mod exec;
mod ir;
mod lex;
#[expect(unsafe_code, reason = "device memory is shared with other threads and processes")]
mod memory;
mod module;
mod parse;
mod space;
mod types;

pub use error::{Fault, ParseError, Site};
pub use exec::Launch;
pub use memory::{Memory, Window};
pub use module::{Function, Global, Image, Module, Param, Relocation, Space};
