//! The bundle of `cargo xtask gpu-bundle`: its stages on simcuda, small and fast. A failure is reported as a
//! failure. With `CKPT_TEST_GPU=1` the stages run as on a machine with a GPU, with the driver and the Python that are
//! there.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ckpt_run_tests::gpu::{Gpu, cuda_python, libcuda_dir};
use ckpt_run_tests::{Sandbox, criu, python, workspace};
use serde_json::Value;

/// Stages about the driver and device memory, and stages of whole jobs: two runs, beside each other.
const OF_MEMORY: &[&str] = &["facts", "driver", "memory", "speed", "kill"];
const OF_JOBS: &[&str] = &["process", "programs", "frameworks", "nccl", "torchrun", "peers"];

/// What cannot be done without PyTorch on a GPU, or with an old PyTorch. Everything else has to pass.
const NEEDS_A_GPU: &[&str] = &[
    "facts: driver and CRIU, PyTorch",
    "facts: private tables",
    "frameworks: torch.compile with CUDA graphs",
    "frameworks: expandable_segments",
    "frameworks: cudaMallocAsync",
    "frameworks: CuPy",
    "frameworks: JAX",
    "frameworks: Triton",
    "frameworks: profiler",
    "nccl: two GPUs, all_reduce",
    "nccl: two GPUs, DDP",
    "nccl: two GPUs, FSDP",
    "nccl: two ranks, all_reduce",
    "nccl: two ranks, DDP",
    "nccl: two ranks, FSDP",
    "torchrun: nccl",
    "torchrun: all GPUs",
    "peers: CRIU with plain driver checkpoint",
    "peers: DCP async_save",
    "peers: ckpt-run beside CRIU and driver",
];

/// Values that have to be measured, since the goals need them.
const MEASURED_OF_MEMORY: &[&str] = &[
    "capture_ratio",
    "copyback_ratio",
    "stall_ratio",
    "stall_beyond_copy_s",
    "resume_ratio",
    "step_slowdown",
    "is_bit_equal",
];
const MEASURED_OF_JOBS: &[&str] = &["is_bit_equal"];
/// What simcuda does otherwise unless it is told to.
const CONTRADICTED: &str = "illing a process that";

fn bundle() -> PathBuf {
    let path = std::env::var_os("CKPT_TEST_BUNDLE").map(PathBuf::from);
    path.filter(|path| path.join("run.sh").is_file()).expect("there is no bundle: call `cargo xtask test`")
}

/// A sandbox and a simulated GPU for the bundle.
struct Machine {
    sandbox: Sandbox,
    gpu: Gpu,
}

impl Machine {
    fn new() -> Self {
        Self { sandbox: Sandbox::new(), gpu: Gpu::new() }
    }

    /// `run.sh`, small and on the simulated GPU.
    fn command(&self, stages: &[&str]) -> Command {
        let mut command = self.gpu.command(bundle().join("run.sh"));
        command.args(stages).current_dir(self.sandbox.path()).env_remove("LD_LIBRARY_PATH");
        command.env("OUT", "out").env("BUNDLE_WORK", self.sandbox.path()).env("BUNDLE_QUICK", "1");
        command.env("BUNDLE_LIBCUDA", libcuda_dir().join("libcuda.so.1"));
        command.env("BUNDLE_PYTHON", python()).env("BUNDLE_TORCH_DEVICE", "cpu");
        command.env("BUNDLE_CUDA_PYTHON", cuda_python());
        command.env("BUNDLE_CRIU", criu());
        // For each stage: none is to be ended, and no step left out, because the machine is slow.
        command.env("BUNDLE_LIMIT_S", "900");
        command
    }

    fn json(&self, name: &str) -> Value {
        let text = self.sandbox.read(&format!("out/{name}.json"));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}.json: {error}: {text}"))
    }

    /// The outcome and the text of a step.
    fn step(&self, stage: &str, step: &str) -> (String, String) {
        let result = self.json(stage);
        let steps = result["steps"].as_array().expect("steps");
        let found = steps.iter().find(|one| one["step"] == step);
        let text = |name: &str| found.map_or("", |one| one[name].as_str().unwrap_or_default()).to_owned();
        (text("outcome"), text("text"))
    }
}

fn run(mut command: Command) -> Output {
    command.output().expect("run.sh runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn stages_of_memory_pass_on_a_simulated_gpu() -> Result<(), String> {
    pass(OF_MEMORY, MEASURED_OF_MEMORY, "1")
}

/// Multicast objects have the memory of two devices.
#[test]
fn stages_of_jobs_pass_on_simulated_gpus() -> Result<(), String> {
    pass(OF_JOBS, MEASURED_OF_JOBS, "2")
}

/// The steps that failed are an error, not a panic: nothing is printed after them, so that a log that was shortened
/// has them.
fn pass(stages: &[&str], measured: &[&str], devices: &str) -> Result<(), String> {
    let machine = Machine::new();
    let mut command = machine.command(stages);
    command.env("SIMCUDA_DEVICES", devices);
    let is_real = std::env::var_os("CKPT_TEST_GPU").is_some();
    if is_real {
        for name in ["QUICK", "LIBCUDA", "PYTHON", "CUDA_PYTHON", "TORCH_DEVICE", "CRIU", "LIMIT_S"] {
            command.env_remove(format!("BUNDLE_{name}"));
        }
    }
    let output = run(command);
    let said = said(&output);
    println!("{said}");
    let failed: Vec<_> = said.lines().map(str::trim).filter(|line| line.starts_with("FAILED")).collect();
    if output.status.code() != Some(0) {
        return Err(format!("{}: {}", output.status, failed.join("; ")));
    }
    if is_real {
        return Ok(());
    }
    let summary = machine.json("summary");
    let steps = |stage: &str| summary["steps"][stage].as_array().expect("steps").clone();
    let mut names = Vec::new();
    for stage in stages {
        assert!(steps(stage).len() > 1, "{stage}");
        for step in steps(stage) {
            let name = format!("{stage}: {}", step["step"].as_str().expect("a name"));
            let wanted = if NEEDS_A_GPU.contains(&name.as_str()) { "skip" } else { "pass" };
            assert_eq!(step["outcome"], wanted, "{name}: {step}");
            names.push(name);
        }
        assert!(machine.sandbox.path().join(format!("out/{stage}-logs.tar.gz")).is_file());
    }
    for name in measured {
        let has_it = |step: &Value| step["values"].get(*name).is_some();
        assert!(stages.iter().any(|stage| steps(stage).iter().any(has_it)), "{name} was not measured");
    }
    assert_eq!(summary["failed"], 0);
    assert!(machine.sandbox.read("out/summary.txt").contains("nothing failed"));
    check_claims(&summary, &names);
    Ok(())
}

/// The steps that claims name exist, and none of them shows the contrary but of speed.
fn check_claims(summary: &Value, steps: &[String]) {
    assert_eq!(summary["is_of_a_gpu"], false);
    for claim in summary["claims"].as_array().expect("claims") {
        let text = claim["claim"].as_str().expect("a text");
        let value = claim["value"].as_str().unwrap_or_default();
        let is_of_speed = ["_s", "_ratio", "_slowdown"].iter().any(|end| value.ends_with(end));
        assert!(claim["verdict"] != "contradicted" || is_of_speed || text.contains(CONTRADICTED), "{claim}");
    }
    let pattern = |step: &str, pattern: &str| match pattern.split_once('*') {
        Some((start, end)) => step.starts_with(start) && step.ends_with(end),
        None => step == pattern,
    };
    for claim in claims() {
        for wanted in claim["steps"].as_array().expect("steps") {
            let wanted = wanted.as_str().expect("a step");
            let stage = wanted.split(": ").next().expect("a stage");
            let is_run = steps.iter().any(|step| step.starts_with(&format!("{stage}: ")));
            assert!(!is_run || steps.iter().any(|step| pattern(step, wanted)), "there is no step {wanted:?}");
        }
    }
}

/// The claims of the bundle's table.
fn claims() -> Vec<Value> {
    let script = "import json, sys; sys.path.insert(0, sys.argv[1])\n\
                  from harness.claims import CLAIMS\n\
                  print(json.dumps([claim._asdict() for claim in CLAIMS]))";
    let mut command = Command::new(python());
    command.args(["-B", "-c", script]).arg(bundle());
    let text = String::from_utf8(run(command).stdout).expect("text");
    serde_json::from_str(&text).expect("claims")
}

#[test]
fn claims_are_in_the_documents_that_they_name() {
    let claims = claims();
    assert!(claims.len() > 30);
    for claim in claims {
        let text = |name: &str| claim[name].as_str().expect("text").to_owned();
        let document = std::fs::read_to_string(workspace().join(text("file"))).expect("the document");
        assert_eq!(
            document.matches(&text("text")).count(),
            1,
            "{} has to say {:?} once: change claims.py or pages/ of xtask/bundle/harness with it",
            text("file"),
            text("text")
        );
        let is_run = !claim["steps"].as_array().expect("steps").is_empty();
        assert_ne!(is_run, !text("why").is_empty(), "steps, or why there are none: {claim}");
    }
}

/// What is wrong with the sentences about GPUs of the pages below a directory: see `harness/sentences.py`.
fn complaints(root: &Path) -> Vec<String> {
    let script = "import json, sys; sys.path.insert(0, sys.argv[1])\n\
                  from harness.sentences import complaints\n\
                  print(json.dumps(complaints(sys.argv[2])))";
    let mut command = Command::new(python());
    command.args(["-B", "-c", script]).arg(bundle()).arg(root);
    let output = run(command);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", said(&output)))
}

#[test]
fn each_sentence_about_gpus_is_a_claim_or_exempt() {
    let found = complaints(&workspace());
    assert!(
        found.is_empty(),
        "add a claim or an exemption to xtask/bundle/harness/pages:\n{}",
        found.join("\n")
    );
}

/// A sentence that is added to a paragraph, an item, a row and a fact; an exemption whose sentence is gone.
#[test]
fn a_new_sentence_about_gpus_is_noticed() {
    let sandbox = Sandbox::new();
    let place = |name: &str| sandbox.path().join(format!("docs/{name}.md"));
    std::fs::create_dir(sandbox.path().join("docs")).expect("a directory");
    for name in ["gpus", "limits", "resuming", "simcuda"] {
        std::fs::copy(workspace().join(format!("docs/{name}.md")), place(name)).expect("a copy");
    }
    assert!(complaints(sandbox.path()).is_empty());
    for (name, text, changed) in [
        ("gpus", "Work on the GPU ends.", "Work on the GPU ends. It is late."),
        ("gpus", "Run nothing else on these GPUs", ""),
        ("limits", "| destroy them |\n", "| destroy them |\n| memory of a new kind | free it |\n"),
        ("limits", "on a GPU is not affected.", "on a GPU is not affected. A GPU is."),
        ("resuming", "GPUs that are not named stay.", "GPUs that are not named stay. They are late."),
        ("simcuda", "| calls in that child fail |", "| calls in that child fail. They are late |"),
    ] {
        let before = std::fs::read_to_string(place(name)).expect("the page");
        let after = before.replacen(text, changed, 1);
        assert_ne!(before, after, "{name}: {text}");
        std::fs::write(place(name), after).expect("a page");
        let found = complaints(sandbox.path());
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        std::fs::write(place(name), before).expect("the page");
    }
}

#[test]
fn each_call_ends_within_ten_minutes_and_all_within_half_an_hour() {
    let script = "import sys; sys.path.insert(0, sys.argv[1])\n\
                  from harness.settings import CALLS, LIMITS_S\n\
                  assert [stage for call in CALLS for stage in call] == list(LIMITS_S)\n\
                  assert CALLS[0] == ['facts'] and CALLS[-1] == ['kill']\n\
                  assert all(len(call) <= 3 and sum(LIMITS_S[stage] for stage in call) <= 540 for call in CALLS)\n\
                  assert sum(LIMITS_S.values()) <= 1800";
    let mut command = Command::new(python());
    command.args(["-B", "-c", script]).arg(bundle());
    let output = run(command);
    assert!(output.status.success(), "{}", said(&output));
}

/// The suite takes the library by its option, which counts more than its variable.
#[test]
fn the_suite_checks_the_nccl_of_pytorch() {
    let sandbox = Sandbox::new();
    let suite = "#!/bin/sh\nkept=\nwhile [ $# -gt 0 ]; do\n\
                 case $1 in --json) kept=$2 ;; --nccl) nccl=$2 ;; esac; shift\ndone\n\
                 echo '{\"checks\": [{\"name\": \"nccl/x\", \"outcome\": \"pass\", \"text\": \"'$nccl'\"}]}' > $kept\n";
    std::fs::create_dir(sandbox.path().join("bin")).expect("a directory");
    std::fs::write(sandbox.path().join("bin/conformance"), suite).expect("a program");
    let script = "import os, sys; sys.path.insert(0, sys.argv[1])\n\
                  from harness import conformance, settings\n\
                  torch = {'nccl_path': '/torch/libnccl.so.2'}\n\
                  facts = {'libcuda': '/libcuda.so.1', 'driver': {'has_checkpoint': True}, 'torch': torch, 'criu': {}}\n\
                  own = settings.Settings(os.getcwd(), facts)\n\
                  own.root = os.getcwd()\n\
                  os.chmod('bin/conformance', 0o755); os.mkdir('logs')\n\
                  print(conformance.outcomes(own, 'nccl/')['nccl/x'][1])";
    let mut command = Command::new(python());
    command.args(["-B", "-c", script]).arg(workspace().join("xtask/bundle")).current_dir(sandbox.path());
    let output = run(command);
    assert_eq!(said(&output), "/torch/libnccl.so.2\n");
}

/// `BUNDLE_ONLY` may be meant for one stage of several.
#[test]
fn a_stage_without_a_wanted_step_does_not_fail() {
    let machine = Machine::new();
    let mut command = machine.command(&["driver", "memory"]);
    command.env("BUNDLE_ONLY", "^no such step$");
    let output = run(command);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    for stage in ["driver", "memory"] {
        let (outcome, text) = machine.step(stage, "stage");
        assert!(outcome == "skip" && text.contains("BUNDLE_ONLY"), "{outcome}: {text}");
    }
}

/// Results of several calls, each with few files, make one table.
#[test]
fn the_summary_is_made_of_results_that_are_there() {
    let machine = Machine::new();
    let mut command = machine.command(&["kill"]);
    command.env("SIMCUDA_KILL_RUINS", "1");
    let output = run(command);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let out = machine.sandbox.path().join("out");
    for name in ["summary.json", "summary.txt"] {
        std::fs::remove_file(out.join(name)).expect("a summary");
    }
    let output = run(machine.command(&["summary"]));
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let summary = machine.json("summary");
    let verdict = |text: &str| {
        let claims = summary["claims"].as_array().expect("claims");
        let found = claims.iter().find(|claim| claim["claim"].as_str().is_some_and(|one| one.contains(text)));
        found.expect("the claim")["verdict"].clone()
    };
    // The device is ruined by the first kill without a checkpoint.
    assert_eq!(verdict(CONTRADICTED), "shown", "{summary}");
    assert_eq!(verdict("pinned host memory"), "not run");
}

#[test]
fn a_driver_error_fails_its_stage_and_the_next_stage_runs() {
    let machine = Machine::new();
    let mut command = machine.command(&["process", "torchrun"]);
    // Without a GPU for PyTorch, there is nothing for torchrun to do.
    command.env("SIMCUDA_FAULT", "cuModuleLoadData:1+=CUDA_ERROR_UNKNOWN").env_remove("BUNDLE_TORCH_DEVICE");
    let output = run(command);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for step in ["train-mlp", "legacy-job"] {
        let (outcome, text) = machine.step("process", step);
        assert!(outcome == "fail" && text.contains("CUDA_ERROR_UNKNOWN"), "{step}: {outcome}: {text}");
    }
    assert_eq!(machine.step("torchrun", "gloo").0, "skip");
    assert_eq!(machine.json("summary")["failed"], 2);
    let text = machine.sandbox.read("out/summary.txt");
    assert!(text.contains("2 failed") && text.contains("FAILED  train-mlp"), "{text}");
}

#[test]
fn a_stage_that_hangs_is_ended_and_what_it_has_found_is_kept() {
    let machine = Machine::new();
    let mut command = machine.command(&["facts"]);
    // The longest for which all that comes before these checks is left out: it needs 20 s.
    command.env("SIMCUDA_FAULT", "cuCheckpointProcessLock:1+=delay:600000").env("BUNDLE_LIMIT_S", "24");
    let output = run(command);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(machine.json("facts")["timed_out"], true, "{said}");
    assert_eq!(machine.step("facts", "doctor").0, "pass");
    let (outcome, text) = machine.step("facts", "checkpoint/");
    assert!(outcome == "fail" && text.contains("limit of 24 s"), "{outcome}: {text}");
    // Nothing is left of it: neither processes nor directories.
    let left = std::fs::read_dir(machine.sandbox.path()).expect("the sandbox");
    let names: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(names, ["out"]);
    assert_eq!(machine.step("facts", "stage").0, "", "{said}");
}

#[test]
fn without_gpu_and_criu_every_step_reports_a_skip() {
    let machine = Machine::new();
    let stages = [OF_MEMORY, OF_JOBS].concat();
    let mut command = machine.command(&stages);
    command.env("BUNDLE_LIBCUDA", "/nonexistent/libcuda.so.1").env("BUNDLE_CRIU", "/bin/false");
    let output = run(command);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let summary = machine.json("summary");
    for stage in stages {
        let count = |outcome: &str| summary["stages"][stage][outcome].as_u64().expect("a number");
        assert!(count("skip") > 0 && count("fail") == 0, "{stage}: {said}");
    }
    assert!(said.contains("SKIPPED train-mlp") && said.contains("no CUDA driver"), "{said}");
}

#[test]
fn output_that_differs_is_a_failure() {
    let machine = Machine::new();
    std::fs::write(machine.sandbox.path().join("output"), "step 1 bits 3f\nstep 2 bits 40\n")
        .expect("a file");
    let harness = bundle();
    let compared = |expected: &str| {
        let script = "import sys; sys.path.insert(0, sys.argv[1])\n\
                      from harness.stages.process import compare\n\
                      compare('output', sys.argv[2])";
        let mut command = Command::new(python());
        command.args(["-B", "-c", script]).arg(&harness).arg(expected).current_dir(machine.sandbox.path());
        run(command)
    };
    assert!(compared("step 1 bits 3f\nstep 2 bits 40\n").status.success());
    for expected in ["step 1 bits 3f\nstep 2 bits 41\n", "step 1 bits 3f\n", ""] {
        let output = compared(expected);
        assert!(said(&output).contains("Fail: "), "{expected:?}: {}", said(&output));
    }
}

#[test]
fn an_unknown_stage_is_bad_input() {
    let machine = Machine::new();
    let output = run(machine.command(&["fact"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("there is no stage 'fact'"), "{}", said(&output));
    assert!(!machine.sandbox.path().join("out").exists());
}
