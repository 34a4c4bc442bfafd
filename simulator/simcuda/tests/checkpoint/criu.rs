//! With the real CRIU: what it refuses while the process holds driver state, and a whole life through an image.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::alloc;
use super::puppet::{
    CHECKPOINTED, LOCKED, Machine, Puppet, RUNNING, SUCCESS, dump_blockers, is_mapped, until,
};

/// CRIU as `cargo xtask setup` installs it, or of `CKPT_CRIU`; `None`, said loudly, where it cannot be used.
fn criu() -> Option<PathBuf> {
    let installed = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/criu/bin/criu");
    let path = std::env::var_os("CKPT_CRIU").map_or_else(installed, PathBuf::from);
    // SAFETY: geteuid has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    if path.exists() && is_root {
        return Some(path);
    }
    ckpt_test_skip::skip(format_args!("needs root, and CRIU at {}", path.display()));
    None
}

/// CRIU's images and logs of one program.
fn images(puppet: &Puppet) -> PathBuf {
    let directory = puppet.directory.path().join("images");
    fs::create_dir_all(&directory).expect("a directory");
    directory
}

/// Dumps a program, which ends it; CRIU's log if the dump fails.
fn dump(criu: &Path, puppet: &Puppet) -> Result<(), String> {
    let directory = images(puppet);
    let pid = puppet.pid.to_string();
    let arguments = ["dump", "-t", &pid, "-o", "dump.log", "-v4", "--file-locks", "-D"];
    let status = Command::new(criu)
        .args(arguments)
        .arg(&directory)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("CRIU");
    if status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&fs::read(directory.join("dump.log")).unwrap_or_default()).into_owned())
}

/// Restores a program in a PID namespace of its own, where it has its old PID, and here another.
fn restore(criu: &Path, puppet: &mut Puppet) {
    let directory = images(puppet);
    let errors = File::create(directory.join("restore.errors")).expect("a file");
    // CRIU stays, as the namespace's init, until the program ends.
    let child = Command::new("unshare")
        .args(["--pid", "--mount-proc", "--fork", "--kill-child"])
        .arg(criu)
        .args(["restore", "-o", "restore.log", "-v4", "-D"])
        .arg(&directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        .spawn()
        .expect("unshare");
    puppet.runs_below(child);
    let command = puppet.directory.path().join("commands").to_string_lossy().into_owned();
    puppet.pid = until("the restored program", || {
        let processes = fs::read_dir("/proc").expect("processes").flatten();
        processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid: &i32| {
            let read = |name| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            read("comm") == b"puppet\n" && String::from_utf8_lossy(&read("cmdline")).contains(&command)
        })
    });
}

#[test]
fn each_tooth_alone_is_refused() {
    let Some(criu) = criu() else { return };
    let machine = Machine::new();
    let start: [fn(&Machine) -> Puppet; 2] = [Machine::initialised, Machine::sandboxed];
    for start in start {
        for (dropped, left) in [("drop-mapping", (true, false)), ("drop-descriptors", (false, true))] {
            let mut puppet = start(&machine);
            assert!(dump(&criu, &puppet).is_err(), "both blockers");
            assert_eq!(puppet.call(dropped), SUCCESS);
            assert_eq!(dump_blockers(puppet.pid), left);
            let log = dump(&criu, &puppet).expect_err("one tooth");
            let is_named = ["userfaultfd", "landlock-ruleset", "secretmem", "packet socket"]
                .iter()
                .any(|name| log.lines().any(|line| line.contains("Error") && line.contains(name)));
            assert!(is_named, "refused for another reason: {log}");
            assert_eq!(puppet.ask("state"), RUNNING);
        }
    }
}

#[test]
fn a_life_through_an_image() {
    let Some(criu) = criu() else { return };
    let machine = Machine::new();
    let mut caller = machine.puppet();
    let mut subject = machine.initialised();
    let address = alloc(&mut subject, 0, 5 << 20, 9);
    let old_pid = subject.pid;
    assert!(dump(&criu, &subject).is_err(), "while running");
    assert_eq!(caller.call(&format!("lock {old_pid} 300000")), SUCCESS);
    assert!(dump(&criu, &subject).is_err(), "while locked");
    let parked = subject.spawn();
    subject.until_parked(parked);
    assert_eq!(caller.call(&format!("checkpoint {old_pid}")), SUCCESS);
    dump(&criu, &subject).expect("nothing is left that CRIU refuses");
    subject.ended();

    restore(&criu, &mut subject);
    let pid = subject.pid;
    assert_ne!(pid, old_pid, "it has its old PID in its own namespace only");
    assert_eq!(caller.ask(&format!("state {pid}")), CHECKPOINTED);
    assert!(is_mapped(pid, address), "a placeholder is in the image too");
    assert_eq!(subject.ask("state"), CHECKPOINTED);
    assert_eq!(caller.call(&format!("restore {pid}")), SUCCESS);
    assert_eq!(dump_blockers(pid), (true, true));
    assert_eq!(caller.ask(&format!("state {pid}")), LOCKED);
    assert_eq!(caller.call(&format!("unlock {pid}")), SUCCESS);
    assert_eq!(
        subject.of_thread(),
        [parked.to_string().as_str(), "ends", "0"],
        "the thread that waited at the lock continues"
    );
    assert_eq!(subject.ask("check 0 9"), "0 same");
    assert!(is_mapped(pid, address));

    // And once more, by itself.
    assert_eq!(subject.call("lock 0 300000"), SUCCESS);
    assert_eq!(subject.call("checkpoint"), SUCCESS);
    assert_eq!(subject.call("restore"), SUCCESS);
    assert_eq!(subject.call("unlock"), SUCCESS);
    assert_eq!(subject.ask("check 0 9"), "0 same");
}
