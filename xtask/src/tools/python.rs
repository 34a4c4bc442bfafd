//! Python: PyTorch from the system's package, uvloop from PyPI in a directory of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::os::Os;
use super::{apt, finish, log_file, unfinished};
use crate::{process, say, workspace};

/// The system's Python. Another one on `PATH` (pyenv, conda) does not see the system's packages.
pub const PYTHON: &str = "/usr/bin/python3";

/// uvloop opens an io_uring when its loop starts; that is what the tests want it for. The version that was tested.
const UVLOOP: &str = "uvloop==0.22.1";

/// A Python that has PyTorch.
pub struct Python {
    /// Its launcher for jobs of several processes.
    pub torchrun: PathBuf,
}

/// Finds PyTorch or installs the system's package of it.
pub fn set_up_torch() -> Result<Python> {
    let start = Instant::now();
    let mut how = String::new();
    let version = match torch_version() {
        Ok(version) => version,
        Err(missing) => {
            install_torch().with_context(|| {
                format!(
                    "{PYTHON} cannot import torch ({missing:#}), and it could not be set up; \
                     install PyTorch for {PYTHON}, on Debian and Ubuntu the package python3-torch"
                )
            })?;
            how = format!(" (installed in {})", say::duration(start.elapsed()));
            torch_version().context("python3-torch was installed, but does not work")?
        }
    };
    let torchrun = ["/usr/bin/torchrun", "/usr/local/bin/torchrun"].map(PathBuf::from);
    let torchrun = torchrun.into_iter().find(|path| path.is_file()).with_context(|| {
        format!("{PYTHON} has torch {version}, but there is no torchrun in /usr/bin or /usr/local/bin")
    })?;
    eprintln!("tools: torch {version} of {PYTHON}, {}{how}", torchrun.display());
    Ok(Python { torchrun })
}

fn torch_version() -> Result<String> {
    let text = process::capture(python().args(["-c", "import torch; print(torch.__version__)"]))?;
    Ok(text.trim().to_owned())
}

fn install_torch() -> Result<()> {
    Os::detect()?.require_apt()?;
    let log = log_file("torch")?;
    eprintln!("tools: installing the system's package python3-torch, the log is {}", log.display());
    apt::install_system(&["python3-torch"], &log)
}

/// Fetches uvloop and returns the directory for `PYTHONPATH`.
pub fn set_up_uvloop() -> Result<PathBuf> {
    let place = workspace::tools_dir().join("python");
    if let Ok(version) = uvloop_version(&place) {
        eprintln!("tools: uvloop {version}, {}", place.display());
        return Ok(place);
    }
    let start = Instant::now();
    let log = log_file("uvloop")?;
    eprintln!("tools: getting {UVLOOP} from PyPI, the log is {}", log.display());
    let work = unfinished()?;
    let built = work.path().join("python");
    let install = || -> Result<String> {
        let mut pip = find_pip(&log)?;
        pip.args(["install", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"])
            .args(["--implementation", "cp", "--python-version", &python_version()?])
            .args(["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"])
            .arg("--target")
            .arg(&built)
            .arg(UVLOOP);
        process::logged(&mut pip, &log)?;
        uvloop_version(&built)
    };
    let version = install().context("uvloop, which tests of io_uring need, could not be set up")?;
    finish(&built, &place)?;
    eprintln!("tools: uvloop {version}, {} (set up in {})", place.display(), say::duration(start.elapsed()));
    Ok(place)
}

fn uvloop_version(dir: &Path) -> Result<String> {
    let check = "import uvloop; uvloop.new_event_loop().close(); print(uvloop.__version__)";
    Ok(process::capture(python().env("PYTHONPATH", dir).args(["-c", check]))?.trim().to_owned())
}

/// A pip of any Python: the wheel is chosen by our own arguments, not by the Python that pip runs under.
fn find_pip(log: &Path) -> Result<Command> {
    let candidate = || {
        let pips = [vec!["python3", "-m", "pip"], vec![PYTHON, "-m", "pip"], vec!["pip3"]];
        pips.into_iter().find(|words| {
            let mut command = Command::new(words[0]);
            process::capture(command.args(&words[1..]).arg("--version")).is_ok()
        })
    };
    let words = match candidate() {
        Some(words) => words,
        None => {
            Os::detect()?.require_apt().context("there is no pip; install one")?;
            apt::install_system(&["python3-pip"], log)?;
            candidate().context("python3-pip was installed, but does not work")?
        }
    };
    let mut pip = Command::new(words[0]);
    pip.args(&words[1..]);
    Ok(pip)
}

/// The version of [`PYTHON`] as pip wants it, for instance `3.11`.
fn python_version() -> Result<String> {
    let script = "import sys; print('%d.%d' % sys.version_info[:2])";
    let text = process::capture(python().args(["-c", script]))?;
    let version = text.trim();
    if version.is_empty() {
        bail!("{PYTHON} does not tell its version");
    }
    Ok(version.to_owned())
}

/// The system's Python without what a user's environment would have it import.
fn python() -> Command {
    let mut command = Command::new(PYTHON);
    command.env_remove("PYTHONPATH").env_remove("PYTHONHOME").env("PYTHONNOUSERSITE", "1");
    command
}
