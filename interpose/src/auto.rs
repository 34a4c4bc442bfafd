//! `CKPT_AUTO`: the first process of a container hands itself over to ckpt-run before its `main`.
//!
//! ```text
//! CKPT_AUTO=1 LD_PRELOAD=…/libckpt_interpose.so python train.py
//!   └─ constructor ─► exec ckpt-run run -- /usr/bin/python train.py
//!                       └─ (a namespace) /usr/bin/python train.py       without CKPT_AUTO
//! ```
//!
//! Which process is the first:
//!
//! | process | does |
//! |---|---|
//! | an init that containers put in front (`tini` and its kin), ckpt-run itself | passes the variable on |
//! | one that was brought into a running container (`docker exec`, a probe of Kubernetes) | runs as it is |
//! | one whose parent had the variable and is no such init | runs as it is, with a message: this library cannot be in the parent, so that only a part of the job would be handed over |
//! | any other | hands itself over |
//!
//! A process that does not pass the variable on removes it from its environment, so that no process below it hands
//! over. If the hand-over fails, the process reports why and runs as it is; with `CKPT_AUTO=required` it exits with
//! 125.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::null;

use ckpt_protocol::agent::AUTO_VARIABLE;

use crate::{exec, process};

/// What is executed.
const LAUNCHER: &str = "ckpt-run";
/// Names it, where it is not found by itself.
const LAUNCHER_VARIABLE: &str = "CKPT_RUN";
/// The exit code of ckpt-run where it fails itself (`EXIT_OWN` there).
const EXIT_OWN: i32 = 125;
/// Inits for containers, as the kernel names their processes: Docker's and Podman's among them.
const INITS: [&[u8]; 6] =
    [b"tini", b"tini-static", b"dumb-init", b"docker-init", b"podman-init", b"catatonit"];

/// What the variable asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// A hand-over if it can be had.
    IfPossible,
    /// A hand-over, or no job.
    Required,
}

/// Where this process stands.
#[derive(Debug, PartialEq, Eq)]
enum Role {
    /// It is what the container was made for.
    First,
    /// An init, or ckpt-run: one below is the first.
    Above,
    /// It was brought in later.
    Guest,
    /// Its parent had the variable and could not follow it.
    ParentNotPreloaded { pid: i32, name: String },
}

/// Hands this process over if `CKPT_AUTO` asks for that. Returns only if this process is to run itself. To be called
/// from the constructor only: it may change the environment.
pub fn hand_over() {
    let Some(value) = process::variable(AUTO_VARIABLE.as_bytes()) else { return };
    let role = role();
    if role == Role::Above {
        return;
    }
    let wanted = wanted(value);
    let value = String::from_utf8_lossy(value).into_owned();
    process::forget_variable(AUTO_VARIABLE);
    let problem = match (wanted, role) {
        (Ok(None), _) | (_, Role::Guest | Role::Above) => return,
        (Err(()), _) => format!("{AUTO_VARIABLE}={value} has to be 1, required or 0"),
        (_, Role::ParentNotPreloaded { pid, name }) => format!(
            "process {pid} ({name}), which started this one, is statically linked or has more rights than its user, so that libckpt_interpose.so cannot be loaded into it. To checkpoint the job with it, put ckpt-run in front of the container's command"
        ),
        (_, Role::First) => {
            let Err(problem) = exec_launcher(&value);
            problem
        }
    };
    if wanted == Ok(Some(Wanted::Required)) {
        say(&format!("ckpt-run: error: {problem} ({AUTO_VARIABLE}={value})\n"));
        // SAFETY: ends the process; nothing of the program has run.
        unsafe { libc::_exit(EXIT_OWN) };
    }
    say(&format!("ckpt-run: warning: the job runs without checkpoints: {problem}\n"));
}

fn wanted(value: &[u8]) -> Result<Option<Wanted>, ()> {
    match value {
        b"" | b"0" | b"off" => Ok(None),
        b"1" | b"on" => Ok(Some(Wanted::IfPossible)),
        b"required" => Ok(Some(Wanted::Required)),
        _ => Err(()),
    }
}

fn role() -> Role {
    if name_of("self").is_some_and(|name| INITS.contains(&&*name) || name == LAUNCHER.as_bytes()) {
        return Role::Above;
    }
    if std::process::id() == 1 {
        return Role::First;
    }
    let parent = std::os::unix::process::parent_id().cast_signed();
    if parent == 0 {
        // The parent is outside of the PID namespace. In one that a pod's containers share, the first process of each
        // is not PID 1; but then PID 1 has other mounts.
        let mounts = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let shared = mounts("1").zip(mounts("self")).is_some_and(|(first, own)| first != own);
        return if shared { Role::First } else { Role::Guest };
    }
    let name = name_of(&parent.to_string()).unwrap_or_default();
    if !INITS.contains(&&*name) && had_variable(parent) {
        return Role::ParentNotPreloaded { pid: parent, name: String::from_utf8_lossy(&name).into_owned() };
    }
    Role::First
}

/// A process's name: the first 15 bytes of the name of the file that it was started from, a script's own.
fn name_of(pid: &str) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_ascii_end().to_vec())
}

/// Whether a process was started with `CKPT_AUTO`, as far as we may know.
fn had_variable(pid: i32) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mut entries = environment.split(|&byte| byte == 0);
    entries.any(|entry| value_of(entry, AUTO_VARIABLE).is_some_and(|value| wanted(value) != Ok(None)))
}

fn value_of<'a>(entry: &'a [u8], name: &str) -> Option<&'a [u8]> {
    entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// Becomes ckpt-run; returns only if that fails, with what failed.
fn exec_launcher(value: &str) -> Result<std::convert::Infallible, String> {
    let launcher = find_launcher()?;
    let command = command().ok_or("this process's own command line cannot be read from /proc")?;
    let fixed = [launcher.as_os_str().as_bytes(), b"run", b"--"];
    let arguments = strings(fixed.into_iter().chain(command.iter().map(Vec::as_slice)))?;
    let auto = format!("{AUTO_VARIABLE}={value}");
    let library = exec::own_path().map(CStr::to_bytes).unwrap_or_default();
    let mut environment: Vec<Vec<u8>> =
        process::environment().filter_map(|entry| without(entry.to_bytes(), library)).collect();
    // The launcher has to know that the job may run without it.
    environment.push(auto.into_bytes());
    let environment = strings(environment.iter().map(Vec::as_slice))?;
    let (argv, envp) = (pointers(&arguments), pointers(&environment));
    // SAFETY: a NUL-terminated path and NULL-terminated arrays of such strings, all live across the call. It returns
    // only if it fails.
    unsafe { libc::execve(arguments[0].as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    let error = std::io::Error::last_os_error();
    Err(format!("{} cannot be executed: {error}", launcher.display()))
}

fn strings<'a>(texts: impl Iterator<Item = &'a [u8]>) -> Result<Vec<CString>, String> {
    texts.map(|text| CString::new(text).map_err(|error| error.to_string())).collect()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([null()]).collect()
}

/// An entry of the environment as the launcher shall have it: this library is not to be loaded into that.
fn without(entry: &[u8], library: &[u8]) -> Option<Vec<u8>> {
    let Some(list) = value_of(entry, "LD_PRELOAD") else { return Some(entry.to_vec()) };
    let file_name = |path: &[u8]| path.rsplit(|&byte| byte == b'/').next().map(<[u8]>::to_vec);
    let others = list
        .split(|byte| matches!(byte, b' ' | b':'))
        .filter(|path| !path.is_empty() && *path != library && file_name(path) != file_name(library));
    let others: Vec<&[u8]> = others.collect();
    (!others.is_empty()).then(|| [b"LD_PRELOAD=".as_slice(), &others.join(&b':')].concat())
}

/// Where ckpt-run is: as `CKPT_RUN` says, beside this library, in `../bin`, or on the `PATH`.
fn find_launcher() -> Result<PathBuf, String> {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    if let Some(named) = process::variable(LAUNCHER_VARIABLE.as_bytes()).filter(|value| !value.is_empty()) {
        let named = path(named);
        return if is_executable(&named) {
            Ok(named)
        } else {
            Err(format!("{LAUNCHER_VARIABLE} names {}, which cannot be executed", named.display()))
        };
    }
    let library = exec::own_path().map(|library| path(library.to_bytes()));
    let dir = library.as_deref().and_then(Path::parent);
    let near = dir.map(|dir| [dir.join(LAUNCHER), dir.join("../bin").join(LAUNCHER)]);
    let listed = process::variable(b"PATH").unwrap_or_default().split(|&byte| byte == b':');
    let listed = listed.filter(|dir| !dir.is_empty()).map(|dir| path(dir).join(LAUNCHER));
    near.into_iter().flatten().chain(listed).find(|path| is_executable(path)).ok_or_else(|| {
        format!(
            "{LAUNCHER} is neither beside libckpt_interpose.so nor in ../bin nor on the PATH; put it there or name it with {LAUNCHER_VARIABLE}"
        )
    })
}

fn is_executable(path: &Path) -> bool {
    let Ok(text) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a NUL-terminated string that is only read.
    path.is_file() && unsafe { libc::access(text.as_ptr(), libc::X_OK) } == 0
}

/// The command that makes a process like this one.
fn command() -> Option<Vec<Vec<u8>>> {
    let line = fs::read("/proc/self/cmdline").ok()?;
    let mut arguments: Vec<Vec<u8>> =
        line.strip_suffix(b"\0")?.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
    // SAFETY: getauxval takes any number and only reads the vector that the kernel left for this process.
    let executed = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const c_char;
    // SAFETY: AT_EXECFN is the address of a NUL-terminated string on the initial stack, which lives as long as the
    // process.
    let executed = (!executed.is_null()).then(|| unsafe { CStr::from_ptr(executed) }.to_bytes());
    arguments[0] = program(executed, &arguments[0], Path::new("/proc/self/exe"))?;
    Some(arguments)
}

/// The program to execute, which has to be `exe` under a name that it knows itself by: Python finds its virtual
/// environment from the path that it was executed by, and busybox its applet.
///
/// `executed` is what was given to `execve`. For a script the kernel has put the interpreter and the script in front
/// of the arguments: then the first one is the interpreter.
fn program(executed: Option<&[u8]>, first: &[u8], exe: &Path) -> Option<Vec<u8>> {
    let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    let own = identity(exe)?;
    let is_own =
        |path: &&[u8]| path.contains(&b'/') && identity(Path::new(OsStr::from_bytes(path))) == Some(own);
    if let Some(path) = executed.filter(is_own).or(Some(first).filter(is_own)) {
        return Some(path.to_vec());
    }
    Some(fs::read_link(exe).ok()?.as_os_str().as_bytes().to_vec())
}

/// One message, in one piece.
fn say(message: &str) {
    // SAFETY: the buffer is as long as is said. Without a stderr the message is lost.
    unsafe { libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read() {
        assert_eq!(wanted(b"1"), Ok(Some(Wanted::IfPossible)));
        assert_eq!(wanted(b"required"), Ok(Some(Wanted::Required)));
        for off in [&b""[..], b"0", b"off"] {
            assert_eq!(wanted(off), Ok(None));
        }
        assert_eq!(wanted(b"yes please"), Err(()));
    }

    #[test]
    fn the_launcher_does_not_get_this_library() {
        let library = b"/opt/lib/libckpt_interpose.so";
        let without =
            |entry: &str| without(entry.as_bytes(), library).map(|entry| String::from_utf8(entry).unwrap());
        assert_eq!(without("LD_PRELOAD=/opt/lib/libckpt_interpose.so"), None);
        assert_eq!(without("LD_PRELOAD=libckpt_interpose.so: "), None);
        assert_eq!(
            without("LD_PRELOAD=/a/b.so /opt/lib/libckpt_interpose.so:/c.so").unwrap(),
            "LD_PRELOAD=/a/b.so:/c.so"
        );
        assert_eq!(
            without("LD_PRELOAD_X=libckpt_interpose.so").unwrap(),
            "LD_PRELOAD_X=libckpt_interpose.so"
        );
    }

    #[test]
    fn a_program_keeps_the_name_that_it_was_executed_by() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).into_os_string().into_encoded_bytes();
        let exe = dir.path().join("python3.11");
        fs::write(&exe, "").unwrap();
        fs::write(dir.path().join("train.py"), "").unwrap();
        let venv = dir.path().join("python");
        std::os::unix::fs::symlink(&exe, venv).unwrap();
        // A program, by a name of its own.
        assert_eq!(program(Some(&at("python")), b"python", &exe).unwrap(), at("python"));
        // A script: its interpreter.
        assert_eq!(program(Some(&at("train.py")), &at("python"), &exe).unwrap(), at("python"));
        // Executed from a descriptor that is closed by now.
        assert_eq!(
            program(None, b"python", Path::new("/proc/self/exe")).unwrap(),
            std::env::current_exe().unwrap().into_os_string().into_encoded_bytes()
        );
    }

    #[test]
    fn this_process_knows_its_command() {
        let command = command().unwrap();
        let own: Vec<Vec<u8>> = std::env::args_os().map(std::ffi::OsString::into_encoded_bytes).collect();
        assert_eq!(command[1..], own[1..]);
        assert!(Path::new(OsStr::from_bytes(&command[0])).is_file());
    }
}
