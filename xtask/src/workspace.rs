//! Where things are in this repository.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::process;

/// The features that compile the named fault points in.
pub const FAULTS: &str = "ckpt-run/faults,ckpt-interpose/faults";

/// The repository's root directory.
///
/// `cargo run` tells where the package is now; the path known at compile time is for a binary that is started by
/// hand.
pub fn root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .filter(|dir| dir.ends_with("xtask"))
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    package.parent().map(Path::to_path_buf).unwrap_or(package)
}

/// Everything that set-up makes lies here, wherever `CARGO_TARGET_DIR` points: it is costly to make again.
pub fn tools_dir() -> PathBuf {
    root().join("target/tools")
}

/// A `cargo` command that runs in the repository's root.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// The directory that Cargo builds into, `CARGO_TARGET_DIR` and Cargo's configuration included.
pub fn target_dir() -> Result<PathBuf> {
    let text = process::capture(cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text).context("reading cargo's metadata")?;
    let target = metadata["target_directory"].as_str().context("cargo's metadata has no target_directory")?;
    Ok(target.into())
}

/// Builds simcuda and puts it where programs find it as the driver: the path of a `libcuda.so.1`, with a `libcuda.so`
/// beside it for `cc -lcuda`.
pub fn simcuda() -> Result<PathBuf> {
    let status = cargo()
        .args(["build", "--package", "simcuda", "--package", "simnvml"])
        .args(["--package", "simnccl", "--package", "simcupti"])
        .status()
        .context("could not start cargo build")?;
    ensure!(status.success(), "simcuda could not be built ({status})");
    link_simcuda()
}

/// The same for a simcuda that was built with the workspace. To build the package alone would build its dependencies
/// anew, with other features.
pub fn link_simcuda() -> Result<PathBuf> {
    let target = target_dir()?;
    let dir = target.join("simcuda");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    for (name, leads_to) in [
        ("libcuda.so.1", "../debug/libsimcuda.so"),
        ("libcuda.so", "libcuda.so.1"),
        ("libnvidia-ml.so.1", "../debug/libsimnvml.so"),
        ("libnccl.so.2", "../debug/libsimnccl.so"),
        ("libnccl.so", "libnccl.so.2"),
        ("libcupti.so.13", "../debug/libsimcupti.so"),
    ] {
        let link = dir.join(name);
        match symlink(leads_to, &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("making the link {}", link.display()));
            }
            _ => {}
        }
    }
    Ok(dir.join("libcuda.so.1"))
}
