//! Why device memory cannot be copied to the mirror or back.

use std::io;

use thiserror::Error;

use crate::cuda::driver::DriverError;

#[derive(Debug, Error)]
pub enum CaptureError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("cannot read the size of the mirror")]
    ReadMirrorSize(#[source] io::Error),
    #[error("the mirror has {found_bytes} bytes, not {bytes}")]
    MirrorTooShort { found_bytes: u64, bytes: u64 },
    #[error("a mirror of {0} bytes does not fit into the address space")]
    MirrorTooLarge(u64),
    #[error("cannot map the mirror")]
    MapMirror(#[source] io::Error),
    #[error("cannot map buffers to copy through")]
    MapBuffers(#[source] io::Error),
    #[error("this kernel allocates memory of the mirror only when it is written")]
    NotPopulated,
    #[error("cannot free parts of the mirror")]
    FreeMirror(#[source] io::Error),
    #[error("cannot find the holes of the mirror")]
    FindHoles(#[source] io::Error),
    #[error("cannot allocate {bytes} bytes for the mirror")]
    AllocateMirror { bytes: u64, source: io::Error },
    #[error(
        "the program has written to more device memory since this checkpoint was prepared than there is free host memory for. Free host memory, or give the job a machine or a container with more"
    )]
    NoRoom,
    #[error("there is no context")]
    NoContext,
    #[error("not all of the {bytes} bytes at {offset} are memory of the process")]
    NotThere { bytes: u64, offset: u64 },
    #[error("{bytes} bytes at {offset} do not fit into a mirror of {mirror_bytes} bytes")]
    BeyondMirror { bytes: u64, offset: u64, mirror_bytes: u64 },
}
