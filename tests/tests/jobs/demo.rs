//! `ckpt-run demo`: what a new user runs first.

use ckpt_run_tests::{Sandbox, criu, python};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// A demo with its directory in the sandbox, whose only Python is the one with PyTorch.
fn demo(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    let mut command = sandbox.command(["demo"]);
    command.args(arguments).env("TMPDIR", temporary(sandbox));
    command.env("PATH", format!("{}:/usr/bin:/bin", python().parent().expect("a directory").display()));
    command
}

fn temporary(sandbox: &Sandbox) -> String {
    let dir = sandbox.path().join("tmp");
    fs::create_dir_all(&dir).unwrap();
    dir.display().to_string()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn shows_a_resume(arguments: &[&str], job: &str) {
    let sandbox = Sandbox::new();
    // The directory may be another user's.
    for module in ["warnings", "types", "contextlib", "torch"] {
        fs::write(sandbox.path().join(format!("{module}.py")), "open('executed', 'w'); raise SystemExit(1)")
            .unwrap();
    }
    let output = demo(&sandbox, arguments).output().unwrap();
    let said = said(&output);
    assert!(!sandbox.path().join("executed").exists(), "{said}");
    assert!(output.status.success(), "{said}");
    for part in
        [job, "is stored", "killed with SIGKILL", "Resumed from the snapshot", "Equal: all 60 results"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(fs::read_dir(sandbox.path().join("tmp")).unwrap().count(), 0, "it has cleaned up");
    assert!(!sandbox.store.exists(), "the user's store is left alone");
}

#[test]
fn the_built_in_job_is_killed_and_ends_like_the_undisturbed_one() {
    shows_a_resume(&["--plain"], "two processes joined by pipes");
}

#[test]
fn a_training_is_killed_and_ends_like_the_undisturbed_one() {
    shows_a_resume(&[], "training with PyTorch");
}

#[test]
fn without_criu_the_demo_says_so() {
    let sandbox = Sandbox::new();
    let mut command = demo(&sandbox, &["--plain"]);
    let output = command.env("CKPT_CRIU", "/nowhere/criu").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("/nowhere/criu does not run as CRIU"), "{}", said(&output));
    assert_eq!(fs::read_dir(sandbox.path().join("tmp")).unwrap().count(), 0);
}

/// The environment has CRIU on the PATH; the package's one lies beside a copy of ckpt-run.
#[test]
fn the_packages_criu_is_used_where_there_is_no_other() {
    let sandbox = Sandbox::new();
    let installed = |name: &str| {
        let path = sandbox.path().join("venv").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    let program = installed("bin/ckpt-run");
    // A descriptor that writes to the copy must not get into a program that another test starts (ETXTBSY).
    assert!(Command::new("cp").arg(ckpt_run_tests::ckpt_run()).arg(&program).status().unwrap().success());
    let packaged = installed("lib/ckpt-run/criu");
    std::os::unix::fs::symlink(criu(), &packaged).unwrap();
    let doctor = || {
        let mut command = Command::new(&program);
        command.args(["doctor", "--json"]).env_remove("CKPT_CRIU").env("PATH", "/nowhere");
        let output = command.current_dir(sandbox.path()).output().unwrap();
        let findings: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let finding = findings.as_array().unwrap().iter().find(|one| one["need"] == "criu").unwrap();
        finding["found"].as_str().unwrap().to_owned()
    };
    if ["/usr/local/sbin/criu", "/usr/sbin/criu", "/sbin/criu"].iter().any(|path| Path::new(path).exists()) {
        assert!(doctor().contains("(the one in PATH)") || doctor().contains("is only"), "{}", doctor());
        return;
    }
    assert!(doctor().contains("(of the package ckpt-run-criu: there is no criu in PATH)"), "{}", doctor());
    fs::remove_file(&packaged).unwrap();
    assert!(doctor().contains("the package ckpt-run-criu is not installed"), "{}", doctor());
}
