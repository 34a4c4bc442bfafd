//! Private roots: one of Debian trixie with PyTorch 2.6, whose TCPStore is newer than the system's PyTorch has, and bare
//! ones with nothing but Python.
//!
//! That PyTorch is built without libuv, which its torchrun asks for all the same. What works is a store in a file:
//!
//! ```text
//! USE_LIBUV=0 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --local_addr 127.0.0.1 \
//!     --rdzv_backend c10d --rdzv_endpoint FILE --rdzv_conf store_type=file --nproc_per_node=2 train.py
//! ```
//!
//! It has no CRIU: trixie's is too old for some kernels. `target/tools/criu` brings its own libraries and runs in the
//! root too, if it is mounted there at the same path.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::os::Os;
use super::{apt, finish, log_file, unfinished};
use crate::{process, say, workspace};

const SUITE: &str = "trixie";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const PACKAGES: &str = "python3-torch,python3-numpy";
/// Suites of bare roots, where packages are installed.
const BARE_SUITES: &[&str] = &["bookworm", "trixie"];
/// What pip and pipx need, and what installs packages for other distributions.
const BARE_PACKAGES: &str = "python3-venv,pipx,python3-wheel-whl,rpm";

/// Finds or makes the bare roots and returns their directories.
pub fn set_up_bare() -> Result<Vec<PathBuf>> {
    let one = |suite: &&str| {
        let name = format!("bare-{suite}");
        let place = workspace::tools_dir().join(&name);
        if ["usr/bin/python3", "usr/bin/pipx", "usr/bin/rpm"]
            .iter()
            .all(|program| place.join(program).exists())
        {
            eprintln!("tools: bare root of {suite}, {}", place.display());
            return Ok(place);
        }
        let start = Instant::now();
        let log = log_file(&name)?;
        eprintln!("tools: making a bare root of {suite}, the log is {}", log.display());
        let work = unfinished()?;
        let root = work.path().join("root");
        debootstrap(suite, BARE_PACKAGES, &root, &log)
            .with_context(|| format!("the bare root of {suite} could not be made"))?;
        finish(&root, &place)?;
        let took = say::duration(start.elapsed());
        eprintln!("tools: bare root of {suite}, {} (made in {took})", place.display());
        Ok(place)
    };
    BARE_SUITES.iter().map(one).collect()
}

/// Finds or makes the root and returns its directory.
pub fn set_up() -> Result<PathBuf> {
    let place = workspace::tools_dir().join("trixie-root");
    if let Ok(version) = torch_version(&place) {
        eprintln!("tools: root of {SUITE} with torch {version}, {}", place.display());
        return Ok(place);
    }
    let start = Instant::now();
    let log = log_file("trixie-root")?;
    eprintln!("tools: making a root of {SUITE} (a minute or two), the log is {}", log.display());
    let version = build(&place, &log).with_context(|| {
        format!(
            "the root of {SUITE} for `cargo xtask test --full` could not be made; it needs Debian, as root"
        )
    })?;
    let took = say::duration(start.elapsed());
    eprintln!("tools: root of {SUITE} with torch {version}, {} (made in {took})", place.display());
    Ok(place)
}

fn build(place: &Path, log: &Path) -> Result<String> {
    let work = unfinished()?;
    let root = work.path().join("root");
    debootstrap(SUITE, PACKAGES, &root, log)?;
    let version = torch_version(&root)?;
    finish(&root, place)?;
    Ok(version)
}

/// Makes a minimal root of a suite with these packages at `root`.
fn debootstrap(suite: &str, packages: &str, root: &Path, log: &Path) -> Result<()> {
    let os = Os::detect()?;
    os.require_apt()?;
    ensure!(os.id == "debian", "only Debian's mirrors have {suite}");
    if process::find_program("debootstrap").is_none() {
        apt::install_system(&["debootstrap"], log)?;
    }
    let sources = apt::sources(&os, suite)?;
    fs::create_dir(root)?;
    // In a mount namespace of its own, so that a debootstrap that is killed leaves no mount behind.
    let mut debootstrap = Command::new("unshare");
    debootstrap
        .args(["--mount", "--propagation", "private", "debootstrap", "--variant=minbase"])
        .arg(format!("--include={packages}"))
        .arg(format!("--keyring={KEYRING}"))
        .arg(suite)
        .arg(root)
        .arg(&sources[0].uri)
        .env("DEBIAN_FRONTEND", "noninteractive");
    process::logged(&mut debootstrap, log)?;
    process::logged(Command::new("chroot").arg(root).args(["apt-get", "clean"]), log)
}

fn torch_version(root: &Path) -> Result<String> {
    let mut chroot = Command::new("chroot");
    chroot.arg(root).args(["/usr/bin/python3", "-c", "import torch; print(torch.__version__)"]);
    chroot.env_remove("PYTHONPATH").env_remove("PYTHONHOME");
    let text = process::capture(&mut chroot)?;
    // The last line: without /proc, a library of PyTorch's complains on the standard output.
    Ok(text.lines().next_back().context("torch tells no version")?.to_owned())
}
