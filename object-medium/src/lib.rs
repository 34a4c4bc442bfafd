//! Snapshots in an object store. [`ObjectMedium`] implements [`ckpt_snapshot::medium::Medium`] for Amazon S3, Google
//! Cloud Storage, Azure Blob Storage and compatible services. A web server can be used for reading.
//!
//! - [`StoreUrl`] is the address that the user gives; addresses with secrets are refused.
//! - [`Pace`] limits the upload rate and pauses uploads while the job uses the network ([`PausePolicy`]).
//! - [`Retry`] is the retry policy of requests.
//!
//! Objects never change, except for small records. A snapshot is committed by a conditional put.

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
pub use retry::{NoAnswer, Retry};
pub use site::Site;
pub use traffic::{Decision, InterfaceTraffic, PausePolicy, TrafficMonitor, sent_bytes};
pub use url::{Service, StoreUrl, StoreUrlError};

use ckpt_snapshot::medium::{DirMedium, Medium};
use std::io;
use std::sync::Arc;

/// Opens the medium at `url`: a directory for `file://`, an [`ObjectMedium`] otherwise.
///
/// # Errors
/// See [`ObjectMedium::open`].
pub fn open(url: &StoreUrl, options: Options) -> io::Result<Arc<dyn Medium>> {
    match url.directory() {
        Some(directory) => Ok(Arc::new(DirMedium::new(directory).with_guard(options.guard))),
        None => Ok(Arc::new(ObjectMedium::open(url, options)?)),
    }
}
