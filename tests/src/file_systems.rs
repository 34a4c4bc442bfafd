//! File systems that a test mounts for itself, in a mount namespace of its own.

use crate::from_env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Set in the namespace: a directory of the outer test.
const WITHIN: &str = "CKPT_TEST_FILE_SYSTEM_DIR";
/// Exit code of the inner test if the file system cannot be mounted.
const UNAVAILABLE: i32 = 77;
/// Large enough for mkfs.xfs, which refuses less than 300 MB. The image is sparse.
const IMAGE_BYTES: u64 = 1 << 30;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4 on a loop device.
    Ext4,
    /// XFS with reflinks on a loop device.
    Xfs,
    /// Btrfs on a loop device.
    Btrfs,
    /// tmpfs.
    Tmpfs,
    /// overlayfs, both layers on ext4.
    Overlay,
}

/// Runs the test `name` (its path in the test program) again in namespaces of its own, where [`inner_directory`] is set.
/// Everything that is mounted or started there is gone with them, also if the test is killed.
///
/// # Errors
/// Why the file system cannot be mounted.
///
/// # Panics
/// When the inner test fails.
pub fn in_namespaces(name: &str, dir: &Path) -> Result<(), String> {
    // Private mounts, and the sockets of ckpt-run, which are found by path.
    let script =
        "mkdir -p /run/ckpt-run && mount -t tmpfs -o mode=700 tmpfs /run/ckpt-run || exit 77; \"$@\" 2>&1";
    let mut outer = Command::new("unshare");
    outer.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    outer.args(["sh", "-c", script, "sh"]).arg(std::env::current_exe().expect("the test's own path"));
    outer.args([name, "--exact", "--nocapture"]).env(WITHIN, dir).stdout(Stdio::piped());
    let mut child = outer.spawn().map_err(|error| format!("unshare: {error}"))?;
    let mut reason = "no mount namespace can be made".to_owned();
    for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
        let line = line.expect("text");
        println!("{line}");
        if let Some((_, why)) = line.split_once("unavailable: ") {
            why.clone_into(&mut reason);
        }
    }
    let status = child.wait().expect("wait");
    match status.code() {
        Some(0) => Ok(()),
        Some(UNAVAILABLE) => Err(reason),
        _ => panic!("{name} in namespaces: {status}"),
    }
}

/// The directory for [`FileSystem::mount`], in the inner test.
#[must_use]
pub fn inner_directory() -> Option<PathBuf> {
    std::env::var_os(WITHIN).map(PathBuf::from)
}

/// Ends the inner test: the file system is not available.
pub fn unavailable(why: &str) -> ! {
    println!("unavailable: {why}");
    std::process::exit(UNAVAILABLE);
}

impl FileSystem {
    /// Makes and mounts one in `dir`, in the inner test. Returns the mount point. For an overlay this is the file system of
    /// its layers, see [`make_layers`].
    ///
    /// # Errors
    /// Why that is not possible.
    pub fn mount(self, dir: &Path) -> Result<PathBuf, String> {
        // The kernel escapes spaces in its tables of mounts.
        let top = dir.join("mounted here");
        fs::create_dir(&top).map_err(|error| error.to_string())?;
        if self == Self::Tmpfs {
            call(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&top))?;
        } else {
            let image = dir.join("image");
            make_image(&image, IMAGE_BYTES)?;
            self.format(&image)?;
            self.mount_image(&image, &top)?;
        }
        Ok(top)
    }

    /// Makes one in an image.
    ///
    /// # Errors
    /// Why that is not possible.
    ///
    /// # Panics
    /// For tmpfs, which has no image.
    pub fn format(self, image: &Path) -> Result<(), String> {
        let mut mkfs = match self {
            Self::Xfs => {
                let mut mkfs = Command::new(from_env("CKPT_TEST_MKFS_XFS", || "mkfs.xfs".into()));
                mkfs.args(["-m", "reflink=1"]);
                mkfs
            }
            Self::Btrfs => Command::new(from_env("CKPT_TEST_MKFS_BTRFS", || "mkfs.btrfs".into())),
            Self::Ext4 | Self::Overlay => {
                let mut mkfs = Command::new("mkfs.ext4");
                // The kernel would write the rest later, in the background.
                mkfs.args(["-E", "lazy_itable_init=0,lazy_journal_init=0"]);
                mkfs
            }
            Self::Tmpfs => panic!("a tmpfs has no image"),
        };
        call(mkfs.arg("-q").arg(image))
    }

    /// Mounts an image on the directory `top`, by a loop device that ends with the mount.
    ///
    /// # Errors
    /// Why that is not possible.
    ///
    /// # Panics
    /// For tmpfs, which has no image.
    pub fn mount_image(self, image: &Path, top: &Path) -> Result<(), String> {
        let (kind, options) = match self {
            // A file that is renamed over another one is not written to the disk for that reason.
            Self::Ext4 | Self::Overlay => ("ext4", "loop,nodiscard,noauto_da_alloc"),
            Self::Xfs => ("xfs", "loop,nodiscard"),
            Self::Btrfs => ("btrfs", "loop,nodiscard"),
            Self::Tmpfs => panic!("a tmpfs has no image"),
        };
        call(Command::new("mount").args(["-t", kind, "-o", options]).arg(image).arg(top))
    }
}

/// Unmounts what is mounted on a directory or file.
///
/// # Errors
/// Why that is not possible.
pub fn unmount(top: &Path) -> Result<(), String> {
    call(Command::new("umount").arg(top))
}

/// Makes the directories of an overlay below `dir`, which does not exist. Returns the lower one.
///
/// # Panics
/// When they cannot be made.
#[must_use]
pub fn make_layers(dir: &Path) -> PathBuf {
    for name in ["lower", "upper", "work"] {
        fs::create_dir_all(dir.join(name)).expect("a directory");
    }
    dir.join("lower")
}

/// Mounts an overlay over its lower directory: what is there is in an image layer from now on.
///
/// # Errors
/// Why that is not possible.
pub fn mount_overlay(lower: &Path) -> Result<(), String> {
    let dir = lower.parent().expect("the layers").display();
    let options = format!("lowerdir={dir}/lower,upperdir={dir}/upper,workdir={dir}/work");
    call(Command::new("mount").args(["-t", "overlay", "-o", &options, "overlay"]).arg(lower))
}

/// Makes a sparse file of this size.
///
/// # Errors
/// Why that is not possible.
pub fn make_image(path: &Path, bytes: u64) -> Result<(), String> {
    File::create(path).and_then(|file| file.set_len(bytes)).map_err(|error| error.to_string())
}

fn call(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {}", said.trim())) }
}
