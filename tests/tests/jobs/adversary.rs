//! What a user can do who may write where ckpt-run of another user looks.

use ckpt_run_tests::Sandbox;
use rustix::io::Errno;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const STRANGER: u32 = 61_009;

/// A configuration that names a program to execute.
fn hostile() -> Sandbox {
    let sandbox = Sandbox::new();
    let program = sandbox.path().join("evil");
    fs::write(&program, "#!/bin/sh\ntouch \"$0.executed\"\n").unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let config = format!("criu = \"{}\"\n", program.display());
    fs::write(sandbox.path().join("ckpt-run.toml"), config).unwrap();
    sandbox
}

fn give_to_stranger(path: &Path) {
    chown(path, Some(STRANGER), Some(STRANGER)).unwrap();
}

fn is_root() -> bool {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    if !is_root {
        ckpt_test_skip::skip("only root can give files to another user");
    }
    is_root
}

/// Runs a command that looks for the configuration and the store in the working directory.
fn call(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(arguments);
    if sandbox.path().join("evil").exists() {
        command.env_remove("CKPT_CRIU");
    }
    command.env_remove("CKPT_STORE").env_remove("SUDO_UID").output().unwrap()
}

fn is_refused(output: &Output, why: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(why) && said.contains("--trust"), "{said}");
}

#[test]
fn the_configuration_of_another_user_is_not_used() {
    if !is_root() {
        return;
    }
    let sandbox = hostile();
    let (config, executed) = (sandbox.path().join("ckpt-run.toml"), sandbox.path().join("evil.executed"));
    give_to_stranger(&config);
    for arguments in [&["doctor"][..], &["ls"], &["--", "true"], &["config"]] {
        is_refused(&call(&sandbox, arguments), "belongs to user 61009");
    }
    // It is enough to be able to replace the file.
    chown(&config, Some(0), Some(0)).unwrap();
    give_to_stranger(sandbox.path());
    is_refused(&call(&sandbox, &["doctor"]), "belongs to user 61009");
    chown(sandbox.path(), Some(0), Some(0)).unwrap();
    fs::set_permissions(sandbox.path(), Permissions::from_mode(0o777)).unwrap();
    is_refused(&call(&sandbox, &["doctor"]), "every user may write to");
    fs::set_permissions(sandbox.path(), Permissions::from_mode(0o700)).unwrap();
    // The program counts, too.
    give_to_stranger(&sandbox.path().join("evil"));
    is_refused(&call(&sandbox, &["doctor"]), "evil belongs to user 61009");
    assert!(!executed.exists());
    let trust = sandbox.path().display().to_string();
    call(&sandbox, &["doctor", "--trust", &trust]);
    assert!(executed.exists(), "the user may allow it");
    fs::write(&config, format!("trust = \"{trust}\"\n")).unwrap();
    let said = call(&sandbox, &["doctor"]);
    assert_eq!(said.status.code(), Some(2), "the file cannot allow itself: {said:?}");
}

/// Files of another user that a trusted configuration or the command line names: what is executed, or written to.
#[test]
fn programs_and_logs_of_another_user_are_not_used() {
    if !is_root() {
        return;
    }
    let (sandbox, theirs) = (hostile(), Sandbox::new());
    let (config, executed) = (sandbox.path().join("ckpt-run.toml"), theirs.path().join("evil.executed"));
    let evil = theirs.path().join("evil");
    fs::copy(sandbox.path().join("evil"), &evil).unwrap();
    fs::remove_file(sandbox.path().join("evil")).unwrap();
    fs::write(theirs.path().join("log"), "theirs").unwrap();
    let with_space = theirs.path().join("evil with space");
    fs::copy(&evil, &with_space).unwrap();
    let probes = [
        format!("timeout 5 '{}' || false", evil.display()),
        format!("true; if ! WHY=1 {}; then true; fi", evil.display()),
        format!("'{}'", with_space.display()),
        format!("sh '{}'", with_space.display()),
    ];
    let log = theirs.path().join("log");
    let key = theirs.path().join("key");
    fs::write(&key, std::array::from_fn::<u8, 32, _>(|at| at as u8)).unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    // In another user's directory, or in one's own and another user's.
    for is_directory in [true, false] {
        let given = if is_directory { vec![theirs.path()] } else { vec![&*evil, &*log, &*key, &with_space] };
        given.into_iter().for_each(give_to_stranger);
        let named = |path: &Path| path.display().to_string();
        let options = [("criu", named(&evil)), ("interpose", named(&evil)), ("log-file", named(&log))];
        let keys = ["encrypt-key-file", "cluster-key-file"].map(|option| (option, named(&key)));
        let probes = probes.iter().map(|probe| ("preempt-probe", probe.clone()));
        for (option, path) in options.into_iter().chain(keys).chain(probes) {
            fs::write(&config, format!("{option} = \"{path}\"\n")).unwrap();
            for arguments in [&["doctor"][..], &["--", "true"]] {
                let mut command = sandbox.command(arguments);
                let output = command.env_remove("CKPT_CRIU").env_remove("SUDO_UID").output().unwrap();
                is_refused(&output, "belongs to user 61009");
            }
            fs::remove_file(&config).unwrap();
            is_refused(
                &call(&sandbox, &[&format!("--{option}"), &path, "--", "true"]),
                "belongs to user 61009",
            );
        }
        chown(theirs.path(), Some(0), Some(0)).unwrap();
    }
    // A name alone is in the working directory.
    give_to_stranger(sandbox.path());
    is_refused(&call(&sandbox, &["--log-file", "messages", "--store", "/nonexistent", "ls"]), "log-file");
    chown(sandbox.path(), Some(0), Some(0)).unwrap();
    assert!(!executed.exists() && !sandbox.path().join("messages").exists());
    assert_eq!(fs::read_to_string(log).unwrap(), "theirs");
    // What is executed by a shell comes with the configuration.
    fs::write(&config, format!("preempt-probe = \"{}\"\n", evil.display())).unwrap();
    give_to_stranger(&config);
    is_refused(&call(&sandbox, &["--", "true"]), "belongs to user 61009");
    assert!(!executed.exists());
}

/// A link of another user in a directory like /tmp.
#[test]
fn a_log_file_by_the_link_of_another_user_is_not_written_to() {
    if !is_root() {
        return;
    }
    let (sandbox, shared) = (Sandbox::new(), Sandbox::new());
    let mine = sandbox.path().join("mine");
    fs::set_permissions(shared.path(), Permissions::from_mode(0o1777)).unwrap();
    let link = shared.path().join("log");
    std::os::unix::fs::symlink(&mine, &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(STRANGER), Some(STRANGER)).unwrap();
    is_refused(
        &call(&sandbox, &["--log-file", link.to_str().unwrap(), "--", "true"]),
        "belongs to user 61009",
    );
    assert!(!mine.exists());
}

#[test]
fn the_store_of_another_user_is_not_used() {
    if !is_root() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.ok(["--", "true"]);
    assert!(call(&sandbox, &["ls"]).status.success());
    give_to_stranger(&sandbox.store);
    for arguments in [&["ls"][..], &["--", "true"], &["prune"]] {
        is_refused(&call(&sandbox, arguments), "belongs to user 61009");
    }
    chown(&sandbox.store, Some(0), Some(0)).unwrap();
    // Of a store from a backup, for example, only a part may be theirs.
    let jobs = sandbox.store.join("jobs");
    for dir in [sandbox.job_dir(), jobs] {
        give_to_stranger(&dir);
        for arguments in [&["ls"][..], &["--", "true"]] {
            is_refused(&call(&sandbox, arguments), "belongs to user 61009");
        }
        chown(&dir, Some(0), Some(0)).unwrap();
    }
    fs::remove_dir_all(&sandbox.store).unwrap();
    give_to_stranger(sandbox.path());
    is_refused(&call(&sandbox, &["--", "true"]), "belongs to user 61009");
    assert!(!sandbox.store.exists(), "nothing was made there");
    let trust = sandbox.path().display().to_string();
    assert!(call(&sandbox, &["--trust", &trust, "--", "true"]).status.success());
}

/// Another user may replace what was looked at.
#[test]
fn what_was_opened_counts_and_not_what_has_its_name() {
    if !is_root() {
        return;
    }
    let shared = Sandbox::new();
    fs::set_permissions(shared.path(), Permissions::from_mode(0o1777)).unwrap();
    let (config, executed) = (shared.path().join("ckpt-run.toml"), shared.path().join("executed"));
    // A fifo without a reader can be removed while it is read.
    let made = Command::new("mkfifo").args(["-m", "666"]).arg(&config).status().unwrap();
    assert!(made.success());
    give_to_stranger(&config);
    let written = {
        let (config, probe) = (config.clone(), format!("preempt-probe = \"touch {}\"\n", executed.display()));
        std::thread::spawn(move || {
            let is_waiting = |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::NXIO);
            let mut open = fs::File::options();
            open.write(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
            let end = Instant::now() + Duration::from_secs(20);
            loop {
                match open.open(&config) {
                    Ok(mut fifo) => {
                        fs::remove_file(&config).unwrap();
                        return fifo.write_all(probe.as_bytes()).is_ok();
                    }
                    Err(error) if is_waiting(&error) && Instant::now() < end => std::thread::yield_now(),
                    Err(_) => return false,
                }
            }
        })
    };
    let said = call(&shared, &["--interval", "off", "--", "sleep", "2"]);
    // If it is still there, the thread ends now.
    let _ = fs::remove_file(&config);
    let was_read = written.join().unwrap();
    assert!(!executed.exists(), "was read: {was_read}, {said:?}");
    is_refused(&said, "belongs to user 61009");

    // The store of another user, made after the first look.
    let hold = shared.path().join("hold");
    fs::write(&hold, "").unwrap();
    let mut command = shared.command(["--", "true"]);
    command.env("CKPT_FAULT", format!("store-trusted=hold:{}", hold.display()));
    command.env_remove("SUDO_UID");
    let mut held = shared.start_command("held", command);
    held.until("a look at the store", || {
        shared.read("held.err").contains("fault point store-trusted").then_some(())
    });
    fs::create_dir(&shared.store).unwrap();
    give_to_stranger(&shared.store);
    fs::remove_file(&hold).unwrap();
    assert_eq!(held.wait(), 2, "{}", held.said());
    assert!(held.said().contains("belongs to user 61009"), "{}", held.said());
}

/// In a directory like /tmp, everybody can make what a store consists of.
#[test]
fn a_store_that_others_can_add_to_is_not_used() {
    let sandbox = Sandbox::new();
    sandbox.ok(["--", "true"]);
    fs::set_permissions(&sandbox.store, Permissions::from_mode(0o1777)).unwrap();
    for arguments in [&["ls"][..], &["--", "true"]] {
        is_refused(&call(&sandbox, arguments), "every user may write to");
    }
    fs::set_permissions(&sandbox.store, Permissions::from_mode(0o700)).unwrap();
    // What an address names, too.
    let remote = sandbox.path().join("remote");
    fs::create_dir(&remote).unwrap();
    let address = format!("file://{}", remote.display());
    for mode in [0o777, 0o1777] {
        fs::set_permissions(&remote, Permissions::from_mode(mode)).unwrap();
        for arguments in [&["--store", &*address][..], &["--upload", &address]] {
            for command in [&["ls"][..], &["--", "true"]] {
                let output = call(&sandbox, &[arguments, command].concat());
                is_refused(&output, "every user may write to");
            }
        }
    }
    assert_eq!(fs::read_dir(&remote).unwrap().count(), 0, "nothing was made there");
    let trust = remote.display().to_string();
    assert!(call(&sandbox, &["--trust", &trust, "--upload", &address, "--", "true"]).status.success());
}
