//! The `SIMCUDA_…` variables, and what a process is that uses the library, in programs of their own
//! (programs/settings.c).

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| common::compile("settings"));

const INVALID_VALUE: &str = "1";
const OUT_OF_MEMORY: &str = "2";
const NO_DEVICE: &str = "100";
const INVALID_DEVICE: &str = "101";
const UNSUPPORTED_PTX_VERSION: &str = "222";
const NOT_SUPPORTED: &str = "801";
const UNKNOWN: &str = "999";

const MIB: usize = 1 << 20;

/// A directory for the devices.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir_in("/dev/shm").expect("a directory for the devices"))
    }

    fn command(&self, environment: &[(&str, &str)], commands: &[&str]) -> Command {
        let mut command = Command::new(&*PROGRAM);
        command.arg(common::library()).args(commands);
        command.env("SIMCUDA_DIR", self.0.path()).env("SIMCUDA_MEMORY", "64MiB");
        command.envs(environment.iter().copied());
        command
    }

    fn run(&self, environment: &[(&str, &str)], commands: &[&str]) -> Output {
        self.command(environment, commands).output().expect("the program")
    }
}

/// What a program says that runs to its end.
fn said(environment: &[(&str, &str)], commands: &[&str]) -> Vec<String> {
    let output = Machine::new().run(environment, commands);
    assert!(output.status.success(), "{output:?}");
    lines(&output)
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// The results of all commands.
fn results(environment: &[(&str, &str)], commands: &[&str]) -> Vec<String> {
    said(environment, commands).iter().map(|line| word(line, 1).to_owned()).collect()
}

fn word(line: &str, index: usize) -> &str {
    line.split(' ').nth(index).unwrap_or_else(|| panic!("no word {index} in {line:?}"))
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

// ---- faults ----

#[test]
fn a_fault_hits_the_call_that_it_names_and_no_other() {
    let fault = |rules| [("SIMCUDA_FAULT", rules)];
    let commands = ["init", "context", "alloc:64", "alloc:64", "alloc:64", "free", "alloc:64"];
    let second = fault("cuMemAlloc_v2:2=CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(results(&second, &commands), ["0", "0", "0", OUT_OF_MEMORY, "0", "0", "0"]);
    let by_number = fault("cuMemAlloc_v2:3=999;cuMemFree_v2:1=801");
    assert_eq!(results(&by_number, &commands), ["0", "0", "0", "0", UNKNOWN, NOT_SUPPORTED, "0"]);
    let and_later = fault("cuMemAlloc_v2:2+=CUDA_ERROR_OUT_OF_MEMORY");
    let expected = ["0", "0", "0", OUT_OF_MEMORY, OUT_OF_MEMORY, "0", OUT_OF_MEMORY];
    assert_eq!(results(&and_later, &commands), expected);
    let any = fault("*:4=CUDA_ERROR_INVALID_VALUE");
    assert_eq!(results(&any, &commands), ["0", "0", "0", INVALID_VALUE, "0", "0", "0"]);
    // A rule that hits does not keep another one from counting the call.
    let both = fault("cuMemAlloc_v2:1=999;cuMemAlloc_v2:2=CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(results(&both, &commands), ["0", "0", UNKNOWN, OUT_OF_MEMORY, "0", "0", "0"]);
}

#[test]
fn a_delay_is_kept() {
    let lines =
        said(&[("SIMCUDA_FAULT", "cuDeviceGet:2=delay:300")], &["init", "timed-device", "timed-device"]);
    let time_us = |line: &str| word(line, 2).parse::<u64>().expect("a number");
    assert_eq!([word(&lines[1], 1), word(&lines[2], 1)], ["0", "0"]);
    assert!(time_us(&lines[2]) >= 300_000, "{lines:?}");
    assert!(time_us(&lines[1]) < time_us(&lines[2]), "{lines:?}");
}

#[test]
fn a_lost_device_stays_lost() {
    let commands = [
        "init",
        "context",
        "stream",
        "alloc:64",
        "launch",
        "count",
        "alloc:64",
        "synchronize",
        "free",
        "context",
        "primary",
        "destroy",
    ];
    let lost = results(&[("SIMCUDA_FAULT", "cuDeviceGetCount:1=lose-device")], &commands);
    // The kernel that never ends does not keep anything from ending, the program neither.
    let mut expected = vec!["0"; 6];
    expected.extend([UNKNOWN; 5]);
    expected.push("0");
    assert_eq!(lost, expected);
}

#[test]
fn an_endless_kernel_does_not_outlive_its_context() {
    let user = ["init", "context", "launch", "destroy"];
    assert_eq!(results(&[], &user), ["0"; 4]);
    // With the rest of the program: the work of a context that is still there ends with the process.
    assert_eq!(results(&[], &["init", "context", "launch"]), ["0"; 3]);
}

#[test]
fn a_bad_fault_ends_the_program() {
    for bad in ["cuNothing:1=999", "cuInit=999", "cuInit:1=NO_SUCH_ERROR", "cuInit:0=999"] {
        let output = Machine::new().run(&[("SIMCUDA_FAULT", bad)], &["init"]);
        assert_eq!(output.status.code(), Some(2), "{bad}: {output:?}");
        assert!(errors(&output).contains("SIMCUDA_FAULT"), "{output:?}");
    }
}

// ---- the machine ----

#[test]
fn a_bad_value_is_told_and_fails_the_start() {
    for (name, value) in [
        ("SIMCUDA_MEMORY", "lots"),
        ("SIMCUDA_MEMORY", "4 bananas"),
        ("SIMCUDA_DEVICES", "many"),
        ("SIMCUDA_DRIVER", "581"),
        ("SIMCUDA_COPY_GBPS", "-1"),
        ("SIMCUDA_THREADS", "0"),
        ("SIMCUDA_CONTEXT_MS", "1s"),
        ("SIMCUDA_JITTER", "yes"),
    ] {
        let output = Machine::new().run(&[(name, value)], &["init", "init"]);
        assert_eq!(
            lines(&output),
            [format!("init {INVALID_VALUE}"), format!("init {INVALID_VALUE}")],
            "{name}"
        );
        assert!(errors(&output).contains(name) && errors(&output).contains(value), "{output:?}");
    }
}

#[test]
fn there_are_as_many_devices_as_are_asked_for() {
    let lines = said(&[("SIMCUDA_DEVICES", "3")], &["init", "count", "device:2", "device:3", "context:2"]);
    let bad = format!("device {INVALID_DEVICE}");
    assert_eq!(lines, ["init 0", "count 0 3", "device 0", &bad, "context 0"]);
    assert_eq!(results(&[("SIMCUDA_DEVICES", "0")], &["init"]), [NO_DEVICE]);
}

#[test]
fn a_context_takes_memory_of_the_device() {
    let machine = Machine::new();
    let environment = [("SIMCUDA_CONTEXT_MEMORY", "24MiB")];
    let commands =
        ["init", "context", "free-bytes", "destroy", "context", "free-bytes", "context", "context"];
    let said = lines(&machine.run(&environment, &commands));
    assert_eq!(said[2], format!("free-bytes 0 {}", 40 * MIB));
    assert_eq!(said[5], said[2], "the first one's memory is free again");
    assert_eq!(said[6..], ["context 0", &format!("context {OUT_OF_MEMORY}")]);
}

#[test]
fn a_context_takes_time() {
    let begun = Instant::now();
    let environment = [("SIMCUDA_CONTEXT_MS", "300")];
    assert_eq!(said(&environment, &["init", "context", "context"])[1..], ["context 0", "context 0"]);
    assert!(begun.elapsed() >= Duration::from_millis(600), "{:?}", begun.elapsed());
}

#[test]
fn a_process_sees_the_devices_that_are_listed() {
    let machine = Machine::new();
    let seen = |listed| {
        let environment = [("SIMCUDA_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", listed)];
        lines(&machine.run(&environment, &["init", "count"])).join(", ")
    };
    assert_eq!(seen("2,0"), "init 0, count 0 2");
    assert_eq!(seen("1,9,0"), "init 0, count 0 1");
    assert_eq!(seen(""), format!("init {NO_DEVICE}, count {NO_DEVICE}"));
}

#[test]
fn an_older_driver_knows_less() {
    let commands = |asked| ["init", "context", "version", "old-call:12080", asked, "load:87", "load:90"];
    let new = said(&[("SIMCUDA_DRIVER", "580")], &commands("new-call:12090"));
    assert_eq!(new[2..], ["version 0 13000", "old-call 0 1", "new-call 0 1", "load 0", "load 0"]);
    let old = said(&[("SIMCUDA_DRIVER", "570")], &commands("new-call:12080"));
    assert_eq!(old[2..4], ["version 0 12080", "old-call 0 1"]);
    assert_eq!(word(&old[4], 2), "0", "it is not there yet: {}", old[4]);
    assert_eq!(old[5..], ["load 0", &format!("load {UNSUPPORTED_PTX_VERSION}")]);
}

#[test]
fn a_copy_takes_the_time_that_the_bus_takes() {
    let commands = ["init", "context", "copy:8000000"];
    let time_us = |lines: &[String]| word(&lines[2], 2).parse::<u64>().expect("a number");
    // Forth and back: 16 MB at 40 MB/s.
    let slow = time_us(&said(&[("SIMCUDA_COPY_GBPS", "0.04")], &commands));
    assert!(slow >= 400_000, "{slow} us");
    let fast = time_us(&said(&[], &commands));
    assert!(fast < slow, "{fast} us");
}

#[test]
fn a_trace_tells_every_call_and_names_what_is_not_supported() {
    let machine = Machine::new();
    let commands = ["init", "array", "alloc:64"];
    let output = machine.run(&[("SIMCUDA_TRACE", "1")], &commands);
    let log = errors(&output);
    for line in [
        "simcuda: cuInit = 0",
        "simcuda: cuArrayCreate_v2 is not supported",
        "simcuda: cuMemAlloc_v2 = 201 (CUDA_ERROR_INVALID_CONTEXT)",
    ] {
        assert!(log.lines().any(|logged| logged == line), "{line:?} in {log}");
    }
    assert_eq!(word(&lines(&output)[1], 1), NOT_SUPPORTED);
    assert_eq!(errors(&machine.run(&[], &commands)), "");
}

// ---- processes ----

/// A program that waits once it has done its commands. It does not outlive its test.
struct Paused(Child);

impl Paused {
    fn after(machine: &Machine, commands: &[&str]) -> Self {
        let mut command = machine.command(&[], commands);
        let mut child =
            command.arg("pause").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program");
        let said = BufReader::new(child.stdout.take().expect("a pipe"));
        let paused = said.lines().map_while(Result::ok).any(|line| line == "pause");
        assert!(paused, "the program ended");
        Self(child)
    }

    /// Kills the process with SIGKILL and reaps it.
    fn kill(&mut self) {
        self.0.kill().expect("a live process");
        self.0.wait().expect("a child");
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn processes_share_a_device_and_give_its_memory_back_when_they_are_killed() {
    let machine = Machine::new();
    let mut holder = Paused::after(&machine, &["init", "context", &format!("alloc:{}", 40 * MIB)]);
    let commands =
        ["init", "context", "free-bytes", &format!("alloc:{}", 30 * MIB), &format!("alloc:{}", 20 * MIB)];
    let beside = lines(&machine.run(&[], &commands));
    assert_eq!(beside[2], format!("free-bytes 0 {}", 24 * MIB));
    assert_eq!([&beside[3], &beside[4]], [&format!("alloc {OUT_OF_MEMORY}"), "alloc 0"]);
    holder.kill();
    let after = lines(&machine.run(&[], &commands));
    assert_eq!(after[2], format!("free-bytes 0 {}", 64 * MIB));
    assert_eq!([&after[3], &after[4]], ["alloc 0", "alloc 0"]);
}

#[test]
fn the_host_cannot_touch_device_memory() {
    for size_bytes in [64, 3 * MIB] {
        let alloc = format!("alloc:{size_bytes}");
        let output = Machine::new().run(&[], &["init", "context", &alloc, "touch"]);
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
        assert_eq!(lines(&output)[2], "alloc 0");
    }
}

#[test]
fn the_child_of_a_fork_has_no_driver() {
    let lines =
        said(&[], &["init", "context", "fork", "synchronize", "alloc:64", "context", "init", "count"]);
    let (child, parent) = lines[2..].split_at(5);
    // The child carries out what comes after the fork; the parent waits for it and continues.
    assert_eq!(child, ["synchronize 3", "alloc 3", "context 3", "init 3", "count 3"]);
    let expected = ["parent 0", "fork 0", "synchronize 0", "alloc 0", "context 0", "init 0", "count 0 1"];
    assert_eq!(parent, expected);
}
