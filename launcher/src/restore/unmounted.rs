//! A file system of the job's files that is not mounted, such as after a reboot: the files would be put back on the disk
//! below its mount point, and the job would go on there.

use crate::files::inventory::Inventory;
use crate::files::rules::{Coverage, FileRules};
use crate::sys::host;
use crate::sys::mounts::{OWN, read_mounts};
use crate::sys::path_text::text_path;
use anyhow::{Result, anyhow};
use ckpt_snapshot::Manifest;

/// Checks that all are mounted. Another machine may have them elsewhere.
///
/// # Errors
/// The mount point.
pub fn check(manifest: &Manifest, inventory: &Inventory, rules: &FileRules) -> Result<()> {
    if manifest.host.hostname != host::facts().hostname || rules.coverage == Coverage::Lenient {
        return Ok(());
    }
    // The look at one mounts what is mounted on demand.
    inventory.mount_points.iter().for_each(|point| drop(std::fs::read_dir(text_path(point))));
    let mounts = read_mounts(OWN)?;
    let is_missing = |point: &&String| mounts.iter().all(|mount| mount.mount_point != text_path(point));
    inventory.mount_points.iter().find(is_missing).map_or(Ok(()), |point| {
        Err(anyhow!(
            "the job has files on the file system that was mounted at {}, and nothing is mounted there now: mount it, and run the same command again. Nothing was changed. To make the files again on the disk below: --files lenient",
            text_path(point).display()
        ))
    })
}
