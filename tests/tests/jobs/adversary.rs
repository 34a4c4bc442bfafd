//! What a user can do who may write where ckpt-run of another user looks.

use ckpt_run_tests::Sandbox;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Output;

const STRANGER: u32 = 61_009;

/// A directory that another user owns, with a configuration that names a program to execute.
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
