//! Preloading the interposer, and the socket on which its agents are met.

use crate::agents::{Agents, Back, Quiesced};
use crate::config::Config;
use crate::runtime_dir::{runtime_dir, short_name};
use anyhow::{Context, Result};
use ckpt_protocol::agent::SOCKET_VARIABLE;
use ckpt_snapshot::{AgentsRecord, JobDir};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// How long the agents in the job's processes may take to disconnect, and to connect again.
pub const AGENTS_LIMIT: Duration = Duration::from_secs(5);

/// The same path in every run of a job: its processes find it again when they are resumed.
fn socket_path(dir: &JobDir) -> Result<PathBuf> {
    Ok(runtime_dir()?.join(format!("{}.agents", short_name(dir.path()))))
}

/// Listens for agents, if the interposer is preloaded.
///
/// # Errors
/// When the socket cannot be made.
pub fn listen(config: &Config, dir: &JobDir) -> Result<Option<Agents>> {
    if config.interpose.is_none() {
        return Ok(None);
    }
    let path = socket_path(dir)?;
    Agents::listen(&path)
        .map(Some)
        .with_context(|| format!("cannot listen for the interposer at {}", path.display()))
}

/// The variables by which the interposer gets into the job's processes and finds its way back here.
///
/// # Errors
/// When there is no directory for the socket.
pub fn variables(config: &Config, dir: &JobDir) -> Result<Vec<(String, OsString)>> {
    let Some(library) = &config.interpose else { return Ok(Vec::new()) };
    let mut preload = library.clone().into_os_string();
    if let Some(more) = std::env::var_os("LD_PRELOAD").filter(|more| !more.is_empty()) {
        preload.push(":");
        preload.push(more);
    }
    let socket = socket_path(dir)?.into_os_string();
    Ok(vec![("LD_PRELOAD".to_owned(), preload), (SOCKET_VARIABLE.to_owned(), socket)])
}

/// Waits for the agents of a job that was resumed.
pub fn welcome_back(agents: &Agents, record: &AgentsRecord) {
    let expected = Quiesced::expected(record.attempt, record.pids.iter().copied());
    tell(&agents.await_back(&expected, AGENTS_LIMIT));
}

/// Says who is back.
pub fn tell(back: &Back) {
    tracing::debug!("interposer: {} processes went on, {} were restored", back.continued, back.restored);
    for process in &back.missing {
        tracing::warn!("the interposer in {process} has not come back");
    }
}
