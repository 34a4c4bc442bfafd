//! Running other programs and telling what went wrong with them.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

use crate::say;

/// How long a step of the set-up may take: a download that hangs, or another that holds a lock, would do so for ever.
const LOGGED_LIMIT: &str = "30m";
/// How many lines of a failed command's output are shown.
const TAIL_LINES: usize = 20;

/// Runs a command and returns what it wrote to its standard output.
pub fn capture(command: &mut Command) -> Result<String> {
    let shown = describe(command);
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("could not start `{shown}`"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        bail!("`{shown}` failed ({}):\n{}", output.status, say::tail(&text, TAIL_LINES));
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` printed something that is no text"))
}

/// Runs a command with its output appended to a log file, of which an error shows the end. One that hangs is ended.
pub fn logged(command: &mut Command, log: &Path) -> Result<()> {
    let shown = describe(command);
    let mut command = limited(command, LOGGED_LIMIT);
    let open = || File::options().create(true).append(true).open(log);
    let out = open().with_context(|| format!("opening {}", log.display()))?;
    let start_bytes = out.metadata()?.len();
    let err = out.try_clone()?;
    let status = command
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .status()
        .with_context(|| format!("could not start `{shown}`"))?;
    if !status.success() {
        let bytes = std::fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes[bytes.len().min(start_bytes as usize)..]);
        let end = say::tail(&text, TAIL_LINES);
        bail!("`{shown}` failed ({status}); the end of {}:\n{end}", log.display());
    }
    Ok(())
}

/// The same command, ended when it takes longer; its exit code is 124 then. `limit` is as for `timeout`.
pub fn limited(command: &Command, limit: &str) -> Command {
    let mut limited = Command::new("timeout");
    limited.args(TIMEOUT).arg(limit).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        limited.current_dir(dir);
    }
    limited
}

/// Options of `timeout`: it says what it ends, and Ctrl-C reaches what it runs.
pub const TIMEOUT: [&str; 3] = ["--verbose", "--foreground", "--kill-after=30s"];

/// The exit code that hands a child's status on, as a shell would.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Finds a program in the directories of `PATH`, and in those for administration that a user's `PATH` may lack.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// The command as one would type it, cut to a readable length.
pub fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    // Which cargo of rustup's it is, nobody wants to know.
    let program = if program.ends_with("cargo") { OsStr::new("cargo") } else { program.as_os_str() };
    let words: Vec<_> =
        std::iter::once(program).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    let mut line = words.join(" ").replace('\n', " ");
    if line.chars().count() > 160 {
        line = line.chars().take(160).chain(['…']).collect();
    }
    line
}
