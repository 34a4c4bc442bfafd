//! The checks, by area.

pub mod alloc;
pub mod arithmetic;
pub mod capture;
pub mod checkpoint;
pub mod context;
pub mod copy;
pub mod device;
pub mod entry;
pub mod event;
pub mod fault;
pub mod graph;
pub mod host;
pub mod hostfn;
pub mod init;
pub mod kernel;
pub mod launch;
pub mod memop;
pub mod module;
pub mod peer;
pub mod pointer;
pub mod pool;
pub mod share;
pub mod stream;
pub mod vmm;
