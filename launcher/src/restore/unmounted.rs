//! A file system of the job's files that is not mounted, such as after a reboot: the files would be put back on the disk
//! below its mount point, and the job would go on there.

use crate::files::inventory::Inventory;
use crate::files::rules::{Coverage, FileRules};
use crate::sys::host;
use crate::sys::mounts::{OWN, is_mounted, read_mounts};
use crate::sys::path_text::text_path;
use anyhow::{Result, anyhow};
use ckpt_snapshot::Manifest;
use std::path::Path;

/// Checks that all are mounted. Another machine may have them elsewhere.
///
/// # Errors
/// The mount point.
pub fn check(manifest: &Manifest, inventory: &Inventory, rules: &FileRules) -> Result<()> {
    let is_chosen = matches!(rules.coverage, Coverage::Lenient | Coverage::Off);
    if manifest.host.hostname != host::facts().hostname || is_chosen {
        return Ok(());
    }
    // The look at one mounts what is mounted on demand.
    inventory.mount_points.iter().for_each(|point| drop(std::fs::read_dir(text_path(point))));
    let mounts = read_mounts(OWN)?;
    let is_gone = |point: &Path| {
        let mut below =
            inventory.entries.keys().map(|path| text_path(path)).filter(|path| path.starts_with(point));
        below.any(|path| path.symlink_metadata().is_err())
    };
    let is_missing = |point: &&String| {
        let point = text_path(point);
        !is_mounted(&mounts, &point) && is_gone(&point)
    };
    inventory.mount_points.iter().find(is_missing).map_or(Ok(()), |point| {
        Err(anyhow!(
            "the job has files on the file system that was mounted at {}, and nothing is mounted there now: mount it, and run the same command again. Nothing was changed. To make the files again on the disk below: --files lenient",
            text_path(point).display()
        ))
    })
}
