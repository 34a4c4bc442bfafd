//! What a user can do who may write where ckpt-run of another user looks.

use ckpt_run_tests::Sandbox;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Output;

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
    let log = theirs.path().join("log");
    // In another user's directory, or in one's own and another user's.
    for is_directory in [true, false] {
        give_to_stranger(if is_directory { theirs.path() } else { &evil });
        for (option, path) in [("criu", &evil), ("interpose", &evil), ("log-file", &log)] {
            if option == "log-file" && !is_directory {
                continue;
            }
            let path = path.display().to_string();
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
    fs::remove_dir_all(&sandbox.store).unwrap();
    give_to_stranger(sandbox.path());
    is_refused(&call(&sandbox, &["--", "true"]), "belongs to user 61009");
    assert!(!sandbox.store.exists(), "nothing was made there");
    let trust = sandbox.path().display().to_string();
    assert!(call(&sandbox, &["--trust", &trust, "--", "true"]).status.success());
}
