//! `CKPT_AUTO`: a command without ckpt-run in front hands itself over to ckpt-run, whatever starts it. Where that is
//! impossible, it runs without ckpt-run.

use ckpt_run_tests::{Sandbox, ckpt_run, python, set_variables, torchrun_with_two_ranks, workspace};
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};

/// Says where it runs, and with what.
const TELL: &str = r#"
import json, os, sys
print(json.dumps({
    "supervised": "__init" in open("/proc/1/cmdline").read().split("\0"),
    "arguments": sys.argv[1:],
    "auto": os.environ.get("CKPT_AUTO"),
    "preload": os.environ.get("LD_PRELOAD"),
    "prefix": sys.prefix,
    "file": sys.argv[0],
}))
"#;

fn library() -> PathBuf {
    ckpt_run().with_file_name("libckpt_interpose.so")
}

/// A command in the sandbox with nothing of ckpt-run but the environment. The `env` in front is not one of the job's
/// processes: what comes behind it is the first that has the variables.
fn auto<S: Into<OsString>>(sandbox: &Sandbox, value: &str, argv: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("env");
    command.arg(format!("CKPT_AUTO={value}")).arg(format!("LD_PRELOAD={}", library().display()));
    command.args(argv.into_iter().map(Into::into)).current_dir(sandbox.path());
    let own = sandbox.command([""; 0]);
    set_variables(&mut command, &own);
    command
}

/// nsenter's option for the working directory.
fn wd(sandbox: &Sandbox) -> String {
    format!("--wd={}", sandbox.path().display())
}

fn output(command: &mut Command) -> (Output, String) {
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

/// What [`TELL`] says.
fn told(command: &mut Command) -> serde_json::Value {
    let (output, said) = output(command);
    assert!(output.status.success(), "{}: {said}", output.status);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Written before it is executed by another process: under another name, so that no fork holds it open for writing.
fn script(sandbox: &Sandbox, name: &str, first_line: &str, body: &str) {
    let path = sandbox.path().join(name);
    fs::write(&path, format!("{first_line}\n{body}")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn front(sandbox: &Sandbox, name: &str, options: &[&str]) -> PathBuf {
    let path = sandbox.path().join(name);
    let source = workspace().join("tests/programs/entrypoint/front.c");
    let status = Command::new("cc").args(options).arg("-o").arg(&path).arg(source).status().expect("cc");
    assert!(status.success());
    path
}

fn assert_supervised(told: &serde_json::Value, arguments: &[&str]) {
    assert_eq!(told["supervised"], true, "{told}");
    assert_eq!(told["arguments"], serde_json::json!(arguments), "{told}");
    assert!(told["auto"].is_null(), "who is below does not ask again: {told}");
    assert!(told["preload"].is_null(), "there is no CUDA driver for it: {told}");
}

#[test]
fn commands_of_all_kinds_hand_themselves_over() {
    let sandbox = Sandbox::new();
    let python = python();
    let python = python.to_str().unwrap();
    script(&sandbox, "tell.py", "#!/usr/bin/env python3", TELL);
    script(&sandbox, "direct.py", &format!("#!{python} -B"), TELL);
    script(&sandbox, "run.sh", "#!/bin/sh -e", &format!("exec {python} tell.py \"$@\""));
    let odd = ["a b", "--", "-v", "", "--store", "é"];
    let cases: [&[&str]; 7] = [
        &[python, "tell.py"],
        &["python3", "tell.py"],
        &["./tell.py"],
        &["./direct.py"],
        &["./run.sh"],
        &[python, "-m", "tell"],
        &["sh", "-c", "exec sh -c 'exec ./tell.py \"$@\"' sh \"$@\"", "sh"],
    ];
    for case in cases {
        let told = told(&mut auto(&sandbox, "1", case.iter().chain(&odd).map(OsString::from)));
        assert_supervised(&told, &odd);
    }
    // As many jobs as there are command lines: no process below handed itself over once more.
    assert_eq!(fs::read_dir(sandbox.store.join("jobs")).unwrap().count(), cases.len());
}

#[test]
fn a_virtual_environment_is_the_same_one() {
    let sandbox = Sandbox::new();
    let bin = sandbox.path().join("venv/bin");
    fs::create_dir_all(&bin).unwrap();
    symlink(python(), bin.join("python3")).unwrap();
    fs::write(sandbox.path().join("venv/pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    let told =
        told(&mut auto(&sandbox, "1", [bin.join("python3").as_os_str(), "-c".as_ref(), TELL.as_ref()]));
    assert_supervised(&told, &[]);
    assert_eq!(told["prefix"], sandbox.path().join("venv").to_str().unwrap());
}

#[test]
fn torchrun_hands_itself_over_with_its_ranks() {
    let sandbox = Sandbox::new();
    script(
        &sandbox,
        "rank.py",
        "",
        "import os; open('rank' + os.environ['RANK'], 'w').write(open('/proc/1/cmdline').read())",
    );
    let mut argv = torchrun_with_two_ranks();
    argv.push("rank.py".into());
    let (output, said) = output(&mut auto(&sandbox, "1", argv));
    assert!(output.status.success(), "{said}");
    for rank in ["rank0", "rank1"] {
        assert!(sandbox.read(rank).contains("__init"), "{rank}");
    }
}

/// PID 1 of a container hands itself over, and so does the child of an init that is PID 1. A process that enters the
/// namespace later does not.
#[test]
fn pid_1_of_a_namespace_hands_itself_over() {
    let sandbox = Sandbox::new();
    script(&sandbox, "tell.py", "#!/usr/bin/env python3", TELL);
    let tini = front(&sandbox, "tini", &[]);
    let contained = |argv: &[&str]| {
        let inner = auto(&sandbox, "1", argv);
        let mut outer = Command::new("unshare");
        outer.args(["--pid", "--fork", "--kill-child", "--mount-proc", "env"]).args(inner.get_args());
        outer.current_dir(sandbox.path());
        set_variables(&mut outer, &inner);
        outer
    };
    assert_supervised(&told(&mut contained(&["./tell.py", "1"])), &["1"]);
    assert_supervised(&told(&mut contained(&[tini.to_str().unwrap(), "./tell.py", "2"])), &["2"]);

    let wait = "open('ready', 'w'); import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)";
    let mut job = sandbox.start_command("job", contained(&["python3", "-c", wait]));
    job.until("a ready job", || sandbox.path().join("ready").exists().then_some(()));
    let first = job.descendants()[0].to_string();
    let bring = |argv: &[&str]| {
        let inner = auto(&sandbox, "1", argv);
        let mut outer = Command::new("nsenter");
        outer.args(["-t", &first, "-m", "-p"]).arg(wd(&sandbox)).arg("env").args(inner.get_args());
        set_variables(&mut outer, &inner);
        outer
    };
    let told = told(&mut bring(&["./tell.py"]));
    assert_eq!((&told["supervised"], &told["auto"]), (&false.into(), &serde_json::Value::Null), "{told}");
    // ckpt-run's own commands do their work.
    let (output, said) = output(&mut bring(&[ckpt_run().to_str().unwrap(), "status"]));
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("running"), "{said}");
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// PID 1 passes signals on to the launcher, and reaps orphans.
#[test]
fn pid_1_passes_signals_on_and_reaps() {
    let sandbox = Sandbox::new();
    let script = "open('ready', 'w'); import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)";
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(ckpt_run());
    command.args(["--", "python3", "-c", script]).current_dir(sandbox.path());
    let own = sandbox.command([""; 0]);
    command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut job = sandbox.start_command("job", command);
    job.until("a ready job", || sandbox.path().join("ready").exists().then_some(()));
    let first = job.descendants()[0];
    // An orphan that was brought in becomes PID 1's.
    let orphan = "(sleep 0.2; : > orphan-ended) & :";
    let status = Command::new("nsenter")
        .args(["-t", &first.to_string(), "-m", "-p"])
        .arg(wd(&sandbox))
        .args(["sh", "-c", orphan])
        .status();
    assert!(status.unwrap().success());
    let children = || {
        let path = format!("/proc/{first}/task/{first}/children");
        fs::read_to_string(path).unwrap().split_whitespace().count()
    };
    job.until("the orphan's end", || sandbox.path().join("orphan-ended").exists().then_some(()));
    job.until("no zombie", || (children() == 1).then_some(()));
    let pid = rustix::process::Pid::from_raw(first).unwrap();
    // The launcher listens from its first snapshot request on at the latest.
    let status = || {
        let mut enter = Command::new("nsenter");
        enter.args(["-t", &first.to_string(), "-m", "-p"]).arg(wd(&sandbox)).arg(ckpt_run());
        enter.args(["status", "--json"]);
        enter.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = enter.output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).ok()
    };
    job.until("a launcher that answers", || status()?[0]["launcher_pid"].as_u64().map(drop));
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(job.said().contains("received SIGTERM"), "{}", job.said());
}

/// Where ckpt-run does not work, the command runs without it, after one message.
#[test]
fn without_a_launcher_that_works_the_job_runs_as_it_is() {
    let sandbox = Sandbox::new();
    script(&sandbox, "tell.py", "#!/usr/bin/env python3", TELL);
    let plain = |name: &str, value: &str, reason: &str| {
        let mut command = auto(&sandbox, "1", ["sh", "-c", "./tell.py x; exit 7"]);
        command.env(name, value);
        let (output, said) = output(&mut command);
        assert_eq!(output.status.code(), Some(7), "{said}");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("what it tells");
        assert_eq!((&told["supervised"], &told["arguments"][0]), (&false.into(), &"x".into()), "{told}");
        assert_eq!(said.matches("ckpt-run: ").count(), 1, "{said}");
        assert!(said.contains("runs without checkpoints") && said.contains(reason), "{said}");
        let mut required = auto(&sandbox, "required", ["sh", "-c", "./tell.py x; exit 7"]);
        required.env(name, value);
        let (output, said) = self::output(&mut required);
        assert!(matches!(output.status.code(), Some(125 | 2)) && output.stdout.is_empty(), "{said}");
        assert!(said.contains("error: ") && said.contains(reason), "{said}");
    };
    plain("CKPT_RUN", "/nonexistent", "CKPT_RUN names /nonexistent");
    plain("CKPT_CRIU", "/nonexistent", "/nonexistent does not run as CRIU");
    plain("CKPT_STORE", "/proc/store", "/proc/store");
    // The library alone, as somebody may have copied it.
    let alone = sandbox.path().join("alone.so");
    fs::copy(library(), &alone).unwrap();
    let mut command = auto(&sandbox, "1", ["./tell.py"]);
    command.env("PATH", "/usr/bin:/bin");
    let preload = format!("LD_PRELOAD={}", alone.display());
    let arguments: Vec<OsString> = command.get_args().map(Into::into).collect();
    let mut copied = Command::new("env");
    copied.args(&arguments[..1]).arg(preload).args(&arguments[2..]).current_dir(sandbox.path());
    let (output, said) = output(&mut copied);
    assert!(output.status.success() && said.contains("is neither beside"), "{said}");
    // A value that means nothing.
    let (output, said) = self::output(&mut auto(&sandbox, "maybe", ["./tell.py"]));
    assert!(output.status.success() && said.contains("CKPT_AUTO=maybe has to be 1"), "{said}");
    // Off is off.
    for off in ["0", ""] {
        let (output, said) = self::output(&mut auto(&sandbox, off, ["./tell.py"]));
        assert!(output.status.success() && said.is_empty(), "{said}");
    }
}

/// Without the rights that it needs, ckpt-run lets the command run alone, unless that would lose progress.
#[test]
fn without_rights_it_steps_aside_unless_there_is_something_to_resume() {
    let sandbox = Sandbox::new();
    let script = "import os, time\nprint('begun', flush=True); open('ready', 'w')\nwhile not os.path.exists('go'): time.sleep(0.01)\n";
    let weak = |value: &str| {
        let inner = auto(&sandbox, value, ["python3", "-c", script]);
        let mut outer = Command::new("setpriv");
        outer
            .args(["--bounding-set", "-sys_admin", "env"])
            .args(inner.get_args())
            .current_dir(sandbox.path());
        set_variables(&mut outer, &inner);
        outer
    };
    fs::write(sandbox.path().join("go"), "").unwrap();
    let (output, said) = output(&mut weak("1"));
    assert!(output.status.success() && output.stdout == b"begun\n", "{said}");
    assert!(said.contains("runs without checkpoints: cannot make a PID namespace"), "{said}");
    let (output, said) = self::output(&mut weak("required"));
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
    for name in ["go", "ready"] {
        fs::remove_file(sandbox.path().join(name)).unwrap();
    }
    let mut job = sandbox.start_command("job", auto(&sandbox, "1", ["python3", "-c", script]));
    job.until("a ready job", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    fs::write(sandbox.path().join("go"), "").unwrap();
    let (output, said) = self::output(&mut weak("1"));
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
    let mut job = sandbox.start_command("again", auto(&sandbox, "1", ["python3", "-c", script]));
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
}

/// A static program cannot load the library. It is reported as soon as it starts a program that can.
#[test]
fn a_static_program_in_front_is_refused_with_the_reason() {
    let sandbox = Sandbox::new();
    script(&sandbox, "tell.py", "#!/usr/bin/env python3", TELL);
    let front = front(&sandbox, "entry", &["-static"]);
    let argv = [front.as_os_str(), "python3".as_ref(), "tell.py".as_ref()];
    let (output, said) = output(&mut auto(&sandbox, "1", argv));
    assert!(output.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"supervised\": false"), "{output:?}");
    assert!(
        said.contains("(entry)")
            && said.contains("statically linked")
            && said.contains("put ckpt-run in front"),
        "{said}"
    );
    let (output, said) = self::output(&mut auto(&sandbox, "required", argv));
    assert_eq!(output.status.code(), Some(125), "{said}");
    // As it says.
    let argv = [ckpt_run().as_os_str(), front.as_os_str(), "python3".as_ref(), "tell.py".as_ref()]
        .map(OsString::from);
    let told = told(&mut auto(&sandbox, "1", argv));
    assert_eq!((&told["supervised"], &told["auto"]), (&true.into(), &serde_json::Value::Null), "{told}");
    // And the launcher says what it cannot do for such a program.
    let mut command = sandbox.command([
        OsString::from("--interpose"),
        library().into(),
        "--".into(),
        front.into(),
        "true".into(),
    ]);
    let (output, said) = self::output(&mut command);
    assert!(
        output.status.success() && said.contains("is statically linked, so that the interposer"),
        "{said}"
    );
}
