//! A job that the demo started.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::tree;
use crate::{process, say};

/// How long killed processes may take to be gone.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);

/// A running command. When dropped, it and everything below it is killed: a demo that fails leaves nothing behind.
pub struct Job {
    child: Child,
    shown: String,
    output: PathBuf,
}

impl Job {
    /// Starts a command whose output goes to the file `output`.
    pub fn start(mut command: Command, output: PathBuf) -> Result<Self> {
        let shown = process::describe(&command);
        let file = File::create(&output).with_context(|| format!("creating {}", output.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("could not start `{shown}`"))?;
        Ok(Self { child, shown, output })
    }

    /// The process ID of the command itself.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the command runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for the end, which must be a success.
    pub fn wait(&mut self, patience: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "`{}` failed ({status}):\n{}", self.shown, self.output_tail());
                return Ok(());
            }
            self.check_patience(start, patience)?;
            pause();
        }
    }

    /// An error if more than `patience` has passed since `start`.
    pub fn check_patience(&self, start: Instant, patience: Duration) -> Result<()> {
        if start.elapsed() > patience {
            let took = say::duration(patience);
            bail!("`{}` is stuck since {took}; what it said:\n{}", self.shown, self.output_tail());
        }
        Ok(())
    }

    /// Kills the command and its children with SIGKILL. Those below must fall by themselves, for a PID namespace dies
    /// with its first process. Returns how many processes there were, once none is left.
    pub fn kill_all(&mut self) -> Result<usize> {
        let below = tree::descendants(self.child.id())?;
        // Held by descriptor, so that what is killed is what was found, whatever happens to its number meanwhile.
        let children: Vec<_> =
            below.iter().filter(|proc| proc.parent == self.child.id()).map(tree::Proc::open).collect();
        self.child.kill()?;
        for child in children.into_iter().flatten() {
            child.kill()?;
        }
        self.child.wait()?;
        let start = Instant::now();
        while below.iter().any(tree::Proc::is_alive) {
            if start.elapsed() > DEATH_TIMEOUT {
                let left: Vec<_> =
                    below.iter().filter(|proc| proc.is_alive()).map(ToString::to_string).collect();
                bail!("still there after {}: {}", say::duration(DEATH_TIMEOUT), left.join(", "));
            }
            pause();
        }
        Ok(below.len() + 1)
    }

    /// The end of what the command printed, for an error message.
    pub fn output_tail(&self) -> String {
        let bytes = std::fs::read(&self.output).unwrap_or_default();
        say::tail(&String::from_utf8_lossy(&bytes), 25)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        let below = tree::descendants(self.child.id()).unwrap_or_default();
        let handles: Vec<_> = below.iter().filter_map(tree::Proc::open).collect();
        // Nothing more can be done about one that cannot be killed.
        let _ = self.child.kill();
        for handle in handles {
            let _ = handle.kill();
        }
        let _ = self.child.wait();
    }
}

/// The time between two looks at something that is waited for.
pub fn pause() {
    thread::sleep(Duration::from_millis(5));
}
