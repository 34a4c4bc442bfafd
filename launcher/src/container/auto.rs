//! `CKPT_AUTO`: the job is a container's command that did not ask for ckpt-run by itself, see interpose/src/auto.rs.
//!
//! Before anything else it is tried whether ckpt-run can work here at all. If it cannot, and there is no snapshot that
//! such a start would waste, the job is executed as it is: it runs no worse than without ckpt-run.

use crate::cli::config::Config;
use crate::criu::Criu;
use crate::job::resume_point::Resume;
use crate::namespace::Namespace;
use crate::report::failure::in_one_line;
use crate::store::root::Root;
use crate::store::tiers;
use anyhow::Result;
use ckpt_protocol::agent::AUTO_VARIABLE;
use ckpt_snapshot::{JobKey, Store};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Whether a job may run without ckpt-run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto {
    /// Nobody spoke of that: it may not.
    Off,
    /// It may, where ckpt-run cannot work.
    IfPossible,
}

impl Auto {
    /// Takes `CKPT_AUTO` out of the environment: the job is not to ask again. To be called while there is one thread.
    #[must_use]
    pub fn take() -> Self {
        let value = std::env::var_os(AUTO_VARIABLE);
        // SAFETY: this process has one thread.
        unsafe { std::env::remove_var(AUTO_VARIABLE) };
        match value.as_deref().and_then(|value| value.to_str()) {
            Some("1" | "on") => Self::IfPossible,
            _ => Self::Off,
        }
    }
}

/// Executes `argv` without ckpt-run if that cannot work here; returns if it can, or if its own error is the better
/// answer.
pub fn run_plain_where_needed(config: &Config, argv: &[OsString]) {
    // Whoever names a snapshot or none at all has spoken of ckpt-run.
    if config.resume != Resume::Auto {
        return;
    }
    let Err(error) = can_work(config) else { return };
    if has_snapshots(config, argv) {
        return;
    }
    tracing::warn!(
        "the job runs without checkpoints: {}. `ckpt-run doctor` says what this container lacks",
        in_one_line(&error)
    );
    let (program, arguments) = argv.split_first().expect("clap wants a command");
    let error = Command::new(program).args(arguments).exec();
    tracing::error!("cannot run {program:?}: {error}");
}

/// What a first start needs of the machine.
fn can_work(config: &Config) -> Result<()> {
    Criu::find(config.criu.as_deref())?;
    Root::open_or_create(&config.store, &config.store.pace())?;
    // It ends at once: nothing runs in it.
    Namespace::create(config.network)?;
    Ok(())
}

/// Whether there is something that a start at the beginning would waste. What cannot be told is taken for a yes.
fn has_snapshots(config: &Config, argv: &[OsString]) -> bool {
    let Ok(cwd) = std::env::current_dir() else { return true };
    let Ok(root) = Root::open(&config.store) else {
        // There may be a store that we must not touch, or snapshots far away.
        return config.store.upload.is_some()
            || config.store.url.is_some()
            || may_be_store(&config.store.dir);
    };
    let key = config.job.clone().unwrap_or_else(|| JobKey::derived(&cwd, argv));
    let listed = tiers::open(&config.store, &root.job(&key)).and_then(|store| Ok(store.list()?));
    listed.map_or(true, |listed| !listed.is_empty())
}

/// Whether a store may be at `path`, one that has lost its `store.json` included. Only what is surely not there is not:
/// a file server that does not answer, or rights that are missing, say nothing of what lies behind.
fn may_be_store(path: &Path) -> bool {
    let may_be = |name: &str| match std::fs::symlink_metadata(path.join(name)) {
        Ok(_) => true,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    };
    may_be("store.json") || may_be("jobs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::StoreRoot;

    #[test]
    fn only_what_is_surely_not_there_is_no_store() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert!(!may_be_store(&at("missing")));
        std::fs::create_dir_all(at("empty/lost+found")).unwrap();
        assert!(!may_be_store(&at("empty")));
        std::fs::create_dir_all(at("lost/jobs")).unwrap();
        assert!(may_be_store(&at("lost")), "store.json is lost, the jobs are there");
        // As EACCES, ESTALE and EIO do, it says nothing of what is there.
        std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
        assert!(may_be_store(&at("loop")));
        StoreRoot::open_or_create(&at("store")).unwrap();
        assert!(may_be_store(&at("store")));
    }
}
