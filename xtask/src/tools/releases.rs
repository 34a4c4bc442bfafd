//! Earlier builds of ckpt-run, from the history of this repository: `target/tools/releases/COMMIT/ckpt-run`. A test
//! resumes with the present build what they have stored.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{finish, log_file, unfinished};
use crate::{process, say, workspace};

/// The variable by which the test finds them.
pub const VARIABLE: &str = "CKPT_TEST_RELEASES";

/// Commits around changes of the store's version, oldest first.
const COMMITS: &[&str] = &[
    // The last one with version 1 of the store.
    "7b1d368",
    // The first and the last one with version 2; the last one has version 3 of the manifest.
    "6156329", "553784c", // The first one with version 3.
    "fa4ab52",
];

/// Builds those that are missing, and returns their directory. `None` in a clone without the history.
pub fn set_up() -> Result<Option<PathBuf>> {
    let place = workspace::tools_dir().join("releases");
    for commit in COMMITS {
        let program = place.join(commit).join("ckpt-run");
        if !program.is_file() {
            if !has_commit(commit) {
                eprintln!("tools: this clone has no commit {commit}: no earlier builds of ckpt-run");
                return Ok(None);
            }
            let start = Instant::now();
            build(commit, &place).with_context(|| format!("building ckpt-run of the commit {commit}"))?;
            eprintln!("tools: ckpt-run of {commit}, built in {}", say::duration(start.elapsed()));
        }
    }
    eprintln!("tools: {} earlier builds of ckpt-run, {}", COMMITS.len(), place.display());
    Ok(Some(place))
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(workspace::root());
    git
}

fn has_commit(commit: &str) -> bool {
    process::capture(git().args(["cat-file", "-e", &format!("{commit}^{{commit}}")])).is_ok()
}

fn build(commit: &str, place: &Path) -> Result<()> {
    let log = log_file("releases")?;
    eprintln!("tools: building ckpt-run of {commit}, the log is {}", log.display());
    let work = unfinished()?;
    let (archive, sources) = (work.path().join("sources.tar"), work.path().join("sources"));
    process::logged(git().arg("archive").arg("--output").arg(&archive).arg(commit), &log)?;
    fs::create_dir(&sources)?;
    // -m: with the commit's time, Cargo would take what is built of another commit for newer.
    process::logged(Command::new("tar").arg("-xmf").arg(&archive).arg("-C").arg(&sources), &log)?;
    // What they depend on is mostly the same, and is built once.
    let target = workspace::tools_dir().join("releases-target");
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--locked", "--package", "ckpt-run", "--target-dir"]).arg(&target);
    process::logged(cargo.current_dir(&sources), &log)?;
    let built = work.path().join("built");
    fs::create_dir(&built)?;
    fs::copy(target.join("debug/ckpt-run"), built.join("ckpt-run")).context("copying ckpt-run")?;
    ensure!(
        process::capture(Command::new(built.join("ckpt-run")).arg("--version")).is_ok(),
        "it does not run"
    );
    fs::create_dir_all(place)?;
    finish(&built, &place.join(commit))
}
