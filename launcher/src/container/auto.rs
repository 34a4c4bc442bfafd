//! `CKPT_AUTO`: the command of a container is run under ckpt-run automatically, see interpose/src/auto.rs.
//!
//! First it is checked whether ckpt-run can work here at all. If it cannot, and the job has no snapshots to resume from, the
//! job is executed without ckpt-run.

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
    /// It may not: `CKPT_AUTO` is not set.
    Off,
    /// It may, where ckpt-run cannot work.
    IfPossible,
}

impl Auto {
    /// Reads `CKPT_AUTO` and removes it from the environment of the job. To be called while there is one thread.
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

/// Executes `argv` without ckpt-run if ckpt-run cannot work here. Returns if it can, or if the job has snapshots: the
/// error of ckpt-run is then the right outcome.
pub fn run_plain_where_needed(config: &Config, argv: &[OsString]) {
    // An explicit --resume asks for ckpt-run. The other nodes of a job would wait for this one.
    if config.resume != Resume::Auto || config.nodes.several().is_some() {
        return;
    }
    let Err(error) = can_work(config) else { return };
    if has_snapshots(config, argv) {
        return;
    }
    tracing::warn!(
        "the job runs without checkpoints: {}. `ckpt-run doctor` shows what this container lacks",
        in_one_line(&error)
    );
    let (program, arguments) = argv.split_first().expect("clap wants a command");
    let error = Command::new(program).args(arguments).exec();
    tracing::error!("cannot run {program:?}: {error}");
}

/// Checks the requirements of a first start.
fn can_work(config: &Config) -> Result<()> {
    Criu::find(config.criu.as_deref())?;
    Root::open_or_create(&config.store, &config.store.pace())?;
    // The namespace ends immediately: nothing runs in it.
    Namespace::create(config.network, None)?;
    Ok(())
}

/// Whether the job may have snapshots, which a start from the beginning would waste.
fn has_snapshots(config: &Config, argv: &[OsString]) -> bool {
    let Ok(cwd) = std::env::current_dir() else { return true };
    let Ok(root) = Root::open(&config.store) else {
        // There may be a store that cannot be opened, or snapshots in an object store.
        return config.store.upload.is_some()
            || config.store.url.is_some()
            || may_be_store(&config.store.dir);
    };
    let key = config.job.clone().unwrap_or_else(|| JobKey::derived(&cwd, argv));
    let listed = tiers::open(&config.store, &root.job(&key)).and_then(|store| Ok(store.list()?));
    listed.map_or(true, |listed| !listed.is_empty())
}

/// Whether a store may be at `path`, even without its `store.json`. Only a path that certainly does not exist is no store:
/// an unreachable file server or missing permissions prove nothing.
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
    fn only_a_missing_path_is_certainly_no_store() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert!(!may_be_store(&at("missing")));
        std::fs::create_dir_all(at("empty/lost+found")).unwrap();
        assert!(!may_be_store(&at("empty")));
        std::fs::create_dir_all(at("lost/jobs")).unwrap();
        assert!(may_be_store(&at("lost")), "store.json is lost, the jobs are there");
        // Like EACCES, ESTALE and EIO, ELOOP does not prove that there is no store.
        std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
        assert!(may_be_store(&at("loop")));
        StoreRoot::open_or_create(&at("store")).unwrap();
        assert!(may_be_store(&at("store")));
    }
}
