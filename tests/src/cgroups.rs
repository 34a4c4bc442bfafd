//! A cgroup with a limit of memory, and one in it for a job: as Slurm and Kubernetes set limits.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::set_variables;

/// Where each version of cgroups is mounted, and what its files for memory are called.
const VERSIONS: [(&str, &str, &str); 2] = [
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
];

/// A cgroup with a limit, and one in it without a limit, for the job. Removed at the end.
pub struct Cgroups {
    limited: PathBuf,
    inner: PathBuf,
    limit: PathBuf,
    usage: PathBuf,
}

impl Cgroups {
    /// `None` where cgroups with limits of memory cannot be made.
    #[must_use]
    pub fn new(name: &str, limit_bytes: u64) -> Option<Self> {
        VERSIONS.into_iter().find_map(|(root, limit, usage)| {
            // With version 1, a tmpfs may be mounted where version 2 is on other machines.
            Path::new(root).join("cgroup.procs").exists().then_some(())?;
            let limited = Path::new(root).join(format!("ckpt-run-test-{name}-{}", std::process::id()));
            fs::create_dir(&limited).ok()?;
            let [inner, limit, usage] = ["inner", limit, usage].map(|name| limited.join(name));
            let cgroups = Self { limited, inner, limit, usage };
            fs::write(&cgroups.limit, limit_bytes.to_string()).ok()?;
            fs::create_dir(&cgroups.inner).ok()?;
            Some(cgroups)
        })
    }

    /// The file that has the memory in use, bytes.
    #[must_use]
    pub fn usage_file(&self) -> &Path {
        &self.usage
    }

    /// Sets the limit to what is in use and `spare_bytes` more.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn leave(&self, spare_bytes: u64) {
        let used: u64 = fs::read_to_string(&self.usage).expect("the usage").trim().parse().expect("a number");
        fs::write(&self.limit, (used + spare_bytes).to_string()).expect("a limit");
    }

    /// The same command in the inner one, executed by another program.
    ///
    /// # Panics
    /// If the command has no directory.
    #[must_use]
    pub fn command_by(&self, wrapper: &[&str], inner: &Command) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo 0 > "$1" && shift && exec "$@""#, "sh"]);
        command.arg(self.inner.join("cgroup.procs")).args(wrapper);
        command.arg(inner.get_program()).args(inner.get_args());
        command.current_dir(inner.get_current_dir().expect("a directory")).stdin(Stdio::null());
        set_variables(&mut command, inner);
        command
    }

    /// The same command in the inner one.
    #[must_use]
    pub fn command(&self, inner: &Command) -> Command {
        self.command_by(&[], inner)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        // Processes that were killed leave it a moment later.
        for _ in 0..600 {
            let _ = fs::remove_dir(&self.inner);
            if fs::remove_dir(&self.limited).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
