//! A job whose processes are running, freshly started or restored.

use crate::agents::Agents;
use crate::files::history::FileHistory;
use crate::namespace::stdio::Stdio;
use crate::namespace::{Namespace, Tree};
use ckpt_snapshot::FailedProcess;

/// A running job: its namespaces, streams and agents.
pub struct RunningJob {
    /// Its namespaces.
    pub namespace: Namespace,
    /// Its standard streams.
    pub stdio: Stdio,
    /// PID of the root of the process tree, in the job's PID namespace.
    pub root_pid: i32,
    /// PID of the command, in the job's PID namespace.
    pub command_pid: i32,
    /// The agents in its processes, if the interposer is preloaded.
    pub agents: Option<Agents>,
    /// Its files, as the snapshot that it was resumed from has them.
    pub files: FileHistory,
    /// The failed process of that snapshot.
    pub failed_process: Option<FailedProcess>,
}

impl RunningJob {
    /// Its processes.
    #[must_use]
    pub fn tree(&self) -> Tree {
        Tree { init_pid: self.namespace.init_pid(), root_pid: self.root_pid }
    }
}
