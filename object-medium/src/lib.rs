//! The remote tier: snapshots in an object store. [`ObjectMedium`] is a [`ckpt_snapshot::medium::Medium`] over S3, Google Cloud
//! Storage, Azure Blob Storage, and what speaks their protocols; a web server can be read from.
//!
//! - [`StoreUrl`] is the address that the user gives; secrets in it are refused.
//! - [`Pace`] limits uploads, and pauses them while the job itself needs the network ([`PausePolicy`]).
//! - [`Retry`] says what is tried again, and for how long.
//!
//! Objects never change, with the exception of small records, and a snapshot is committed by a conditional put.

#![forbid(unsafe_code)]

mod connect;
mod medium;
mod pace;
mod reader;
mod retry;
mod site;
mod traffic;
mod url;
mod writer;

pub use medium::{ObjectMedium, Options};
pub use pace::Pace;
pub use retry::Retry;
pub use site::Site;
pub use traffic::{Decision, PausePolicy, Sent, Watch, sent_bytes};
pub use url::{Service, StoreUrl, StoreUrlError};

use ckpt_snapshot::medium::{DirMedium, Medium};
use std::io;
use std::sync::Arc;

/// The medium at `url`, whatever its kind: a directory's for `file://`, an [`ObjectMedium`] otherwise.
///
/// # Errors
/// See [`ObjectMedium::open`].
pub fn open(url: &StoreUrl, options: Options) -> io::Result<Arc<dyn Medium>> {
    match url.directory() {
        Some(directory) => Ok(Arc::new(DirMedium::new(directory))),
        None => Ok(Arc::new(ObjectMedium::open(url, options)?)),
    }
}
