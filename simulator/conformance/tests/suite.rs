//! The whole suite against the simulated driver, and against a real one where there is one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use cuda_abi::ENTRY_POINTS;
use object::{Object, ObjectSymbol};

/// Checks of other releases than the one that is simulated by default, and of its modes. Everything else must pass or be an
/// answer.
const SKIPPED: &[&str] = &[
    "checkpoint/mig",
    "checkpoint/mps",
    "checkpoint/pairs-before-580",
    "checkpoint/before-570",
    "multicast/bind-for-device",
    "device/persistence",
    "checkpoint/no-room",
    "checkpoint/kill-checkpointed",
    "checkpoint/kill-ruins",
];

/// Allows checks that ruin what they use.
const RUINS: &str = "CONFORMANCE_RUINS";

/// The simulated driver, as `cargo xtask test` builds it.
fn simcuda() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/simcuda/libcuda.so.1");
    let path = std::env::var_os("CKPT_TEST_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "there is no {}: call `cargo xtask test`", path.display());
    path
}

/// A real driver: `CKPT_TEST_REAL_LIBCUDA`, or what the dynamic linker knows.
fn real_driver() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("CKPT_TEST_REAL_LIBCUDA") {
        return Some(path.into());
    }
    let output =
        ["ldconfig", "/sbin/ldconfig"].iter().find_map(|it| Command::new(it).arg("-p").output().ok())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.trim_start().starts_with("libcuda.so.1 "))?;
    line.split(" => ").nth(1).map(PathBuf::from)
}

/// Each check's outcome and text.
type Outcomes = BTreeMap<String, (String, String)>;

fn conformance() -> Command {
    Command::new(env!("CARGO_BIN_EXE_conformance"))
}

fn run(library: &Path, arguments: &[&str]) -> Outcomes {
    run_with(library, arguments, &[])
}

fn run_with(library: &Path, arguments: &[&str], environment: &[(&str, &Path)]) -> Outcomes {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("report.json");
    let mut command = conformance();
    command.arg("--lib").arg(library).arg("--json").arg(&file).args(arguments);
    command.envs(environment.iter().copied());
    // CUPTI lies beside the simulated driver.
    command.env("LD_LIBRARY_PATH", library.parent().unwrap());
    // Only the simulated driver knows these.
    command.envs([("SIMCUDA_DEVICES", "2"), ("SIMCUDA_MEMORY", "4GiB")]);
    let output = command.output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}: {errors}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let line =
        |check: &serde_json::Value| (text(&check["name"]), (text(&check["outcome"]), text(&check["text"])));
    report["checks"].as_array().unwrap().iter().map(line).collect()
}

/// What docs/simcuda.md says of a driver is checked, and each check says where it is known from.
#[test]
fn checks_of_the_table_of_facts_have_a_source() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/simcuda.md");
    let page = std::fs::read_to_string(page).unwrap();
    let listed = String::from_utf8(conformance().arg("--list").output().unwrap().stdout).unwrap();
    let texts: BTreeMap<_, _> = listed.lines().filter_map(|line| line.split_once(' ')).collect();
    let areas: BTreeSet<_> = texts.keys().filter_map(|name| name.split('/').next()).collect();
    let is_check = |name: &&str| {
        let words = name.split_once('/').filter(|(area, check)| areas.contains(area) && !check.is_empty());
        words.is_some_and(|(_, check)| check.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'))
    };
    let named: BTreeSet<_> = page.split('`').skip(1).step_by(2).filter(is_check).collect();
    assert!(named.len() > 25, "{named:?}");
    let is_question = |name: &str| name.starts_with("question/");
    let without: Vec<_> = named
        .into_iter()
        .filter(|name| !texts.get(name).is_some_and(|text| is_question(name) || text.contains("source: ")))
        .collect();
    assert!(without.is_empty(), "checks that are not there, or have no source: {without:?}");
}

/// All checks with the simulated driver, once for all tests.
fn simulated() -> &'static Outcomes {
    static SIMULATED: LazyLock<Outcomes> = LazyLock::new(|| run(&simcuda(), &["--jobs", &jobs()]));
    &SIMULATED
}

fn jobs() -> String {
    std::thread::available_parallelism().unwrap().to_string()
}

#[test]
fn the_simulated_driver_driver_passes() {
    let outcomes = simulated();
    let wrong: Vec<_> = outcomes
        .iter()
        .filter(|(name, (outcome, _))| match outcome.as_str() {
            "pass" | "answer" => false,
            "skipped" => !SKIPPED.contains(&name.as_str()),
            _ => true,
        })
        .map(|(name, (outcome, text))| format!("{name}: {outcome}: {text}"))
        .collect();
    assert!(outcomes.len() > 100, "only {} checks", outcomes.len());
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), outcomes.len(), wrong.join("\n"));
}

#[test]
fn the_simulated_driver_is_as_strict_in_each_mode() {
    for (check, variable) in [
        ("checkpoint/mig", "SIMCUDA_MIG"),
        ("checkpoint/mps", "SIMCUDA_MPS"),
        ("device/persistence", "SIMCUDA_PERSISTENCE"),
        ("checkpoint/kill-checkpointed", "SIMCUDA_KILL_RUINS"),
        ("checkpoint/kill-ruins", "SIMCUDA_KILL_RUINS"),
        ("checkpoint/no-room", RUINS),
    ] {
        let environment = [(variable, Path::new("1")), (RUINS, Path::new("1"))];
        let outcomes = run_with(&simcuda(), &[check], &environment);
        assert_eq!(outcomes[check].0, "pass", "{outcomes:?}");
    }
}

/// Each release has its own rules for checkpoints: nothing fails, and what it has is not skipped.
#[test]
fn each_release_passes() {
    let areas = ["checkpoint/", "entry/", "multicast/bind-for-device"];
    for (release, not_skipped) in [
        ("550", &["checkpoint/before-570"][..]),
        ("570", &["checkpoint/content", "checkpoint/pairs-before-580"]),
        ("575", &["checkpoint/content", "checkpoint/pairs-before-580"]),
        ("590", &["checkpoint/content", "checkpoint/pairs", "checkpoint/ipc", "multicast/bind-for-device"]),
        ("610", &["checkpoint/content", "checkpoint/pairs", "checkpoint/ipc", "multicast/bind-for-device"]),
    ] {
        let outcomes = run_with(&simcuda(), &areas, &[("SIMCUDA_DRIVER", Path::new(release))]);
        let failed: Vec<_> = outcomes.iter().filter(|(_, (outcome, _))| outcome == "fail").collect();
        assert!(failed.is_empty(), "{release}: {failed:?}");
        for name in not_skipped {
            assert_eq!(outcomes[*name].0, "pass", "{release}, {name}: {}", outcomes[*name].1);
        }
    }
}

/// Checks of other areas that export memory.
const EXPORTS: &[&str] = &[
    "checkpoint/ipc",
    "checkpoint/multicast-hangs",
    "device/torn-down",
    "host-vmm/shared",
    "multicast/export",
    "multicast/other-process",
    "question/checkpoint-parked",
    "question/export-after-restore",
    "question/ipc-in-a-job",
    "question/parked-memory",
    "question/teardown",
];

/// What takes a launcher: these run under ckpt-run (`tests/tests/gpu/jobs.rs`).
fn takes_a_launcher(name: &str) -> bool {
    // Without a launcher that passes memory on, each export and import waits for one, a minute.
    let areas = ["ipc/", "share/", "pool-ipc/", "nccl/", "question/nccl-"];
    areas.iter().any(|area| name.starts_with(area)) || EXPORTS.contains(&name)
}

/// What the driver refuses and the interposer permits: it creates memory so that it can be exported, memory of cuMemAlloc
/// included, and such memory can be bound to any multicast object. A handle that was released is an error before the driver
/// sees it, which would end the process.
const PERMITTED: &[&str] =
    &["multicast/bind-shareable", "multicast/bind-plain-address", "vmm/released-handle"];

/// Answers that are the same on each run, and so on one driver with and without the interposer.
const SAME_ANSWERS: &[&str] = &["question/attributes", "question/memory-info", "question/ipc-interior"];

/// The interposer, as `cargo xtask test` builds it.
fn interposer() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join("libckpt_interpose.so");
    assert!(path.is_file(), "there is no {}: call `cargo xtask test`", path.display());
    path
}

#[test]
fn the_driver_behind_the_interposer_is_still_the_driver() {
    let (interposer, directory) = (interposer(), tempfile::tempdir().unwrap());
    // No launcher listens there: the agent in each process waits for one, and the calls work all the same.
    let socket = directory.path().join("socket");
    let environment = [("LD_PRELOAD", interposer.as_path()), ("CKPT_AGENT_SOCKET", &socket)];
    let mut plain = simulated().clone();
    plain.retain(|name, _| !takes_a_launcher(name) && !PERMITTED.contains(&name.as_str()));
    let jobs = jobs();
    let names: Vec<&str> = ["--jobs", &jobs].into_iter().chain(plain.keys().map(String::as_str)).collect();
    let interposed = run_with(&simcuda(), &names, &environment);
    assert!(plain.len() > 100 && plain.len() == interposed.len());
    let mut different = Vec::new();
    for (name, (outcome, text)) in &plain {
        let (other, other_text) = &interposed[name];
        let is_same = outcome == other && (!SAME_ANSWERS.contains(&name.as_str()) || text == other_text);
        if !is_same {
            different.push(format!("{name}: {outcome} {text}; interposed {other} {other_text}"));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// NVIDIA's hangs or errs where ranks call different collectives; the stand-in says so.
#[test]
fn the_simulated_nccl_reports_what_cannot_succeed() {
    let outcomes = run(
        &simcuda(),
        &[
            "question/nccl-mismatch",
            "question/nccl-other-order",
            "question/nccl-dead-peer",
            "question/nccl-dead-peer-sockets",
        ],
    );
    let answer = |name: &str| outcomes[name].1.clone();
    assert!(answer("question/nccl-mismatch").contains("rank 0: asynchronous error 5"), "{outcomes:?}");
    assert!(answer("question/nccl-mismatch").contains("rank 1: asynchronous error 5"), "{outcomes:?}");
    // Over memory and over sockets. Rank 0, which only sends in one of the calls, may not notice.
    let other_order = answer("question/nccl-other-order");
    let of_rank_1 = other_order.split("rank 1: ").skip(1);
    let is_told = |said: &&str| said.starts_with("asynchronous error 5") || said.starts_with("error 5 of");
    assert_eq!(of_rank_1.filter(is_told).count(), 2, "{other_order}");
    assert_eq!(answer("question/nccl-dead-peer"), "rank 0: still waiting after 3 s; rank 1 ended");
    let dead = answer("question/nccl-dead-peer-sockets");
    let is_known = ["asynchronous error 6", "error 6 of the call"].iter().any(|error| dead.contains(error));
    assert!(is_known, "{dead}");
}

/// Where both drivers differ, the simulated one is wrong: see simulator/README.md.
#[test]
fn a_real_driver_passes_and_the_simulated_driver_does_the_same() {
    let Some(real) = real_driver() else {
        ckpt_test_skip::skip("there is no real libcuda.so.1 here");
        return;
    };
    let (real, simulated) = (run(&real, &[]), simulated());
    let mut different = Vec::new();
    for (name, (outcome, text)) in &real {
        let (other, other_text) = &simulated[name];
        if outcome != other {
            different.push(format!("{name}: real {outcome} {text}; simulated {other} {other_text}"));
        } else if outcome == "answer" {
            println!("{name}:\n    real      {text}\n    simulated {other_text}");
        }
    }
    // A real machine may lack a second device, or a driver that is new enough.
    different.retain(|line| !line.contains(": real skipped"));
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// The driver API's symbols that a library defines.
fn symbols(library: &Path) -> Vec<String> {
    let bytes = std::fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let defined = file.dynamic_symbols().filter(ObjectSymbol::is_definition);
    let names = defined.map(|symbol| symbol.name().unwrap().to_owned());
    let entry_point =
        |name: &String| name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(char::is_uppercase));
    let mut names: Vec<_> = names.filter(entry_point).collect();
    names.sort_unstable();
    names
}

#[test]
fn the_simulated_driver_driver_exports_exactly_the_table() {
    let mut wanted: Vec<String> = ENTRY_POINTS
        .iter()
        .flat_map(|row| [Some(row.symbol), row.per_thread.map(|(symbol, _)| symbol)])
        .flatten()
        .map(str::to_owned)
        .collect();
    wanted.sort_unstable();
    let exported = symbols(&simcuda());
    let missing: Vec<_> = wanted.iter().filter(|name| !exported.contains(name)).collect();
    let extra: Vec<_> = exported.iter().filter(|name| !wanted.contains(name)).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing {missing:?}, not in the table {extra:?}");
}

#[test]
fn bad_input_is_exit_code_2() {
    let directory = tempfile::tempdir().unwrap();
    let rubbish = directory.path().join("libcuda.so.1");
    std::fs::write(&rubbish, "this is no library").unwrap();
    let library = simcuda();
    for (library, name) in [
        (Path::new("/nonexistent/libcuda.so.1"), "init/flags"),
        (rubbish.as_path(), "init/flags"),
        (library.as_path(), "nothing/of-the-kind"),
        (library.as_path(), "nothing/"),
    ] {
        let output = conformance().arg("--lib").arg(library).arg(name).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{} {name}: {errors}", library.display());
        assert!(errors.starts_with("conformance: "), "{errors}");
    }
}

#[test]
fn a_driver_that_errs_is_exit_code_1() {
    let mut command = conformance();
    command.arg("--lib").arg(simcuda()).args(["alloc/zero-bytes", "alloc/alignment"]);
    command.env("SIMCUDA_FAULT", "cuMemAlloc_v2:1=CUDA_ERROR_UNKNOWN");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("CUDA_ERROR_UNKNOWN"), "{text}");
    assert!(text.contains("0 passed, 2 failed"), "{text}");
}

#[test]
fn a_driver_that_dies_is_a_failed_check() {
    let directory = tempfile::tempdir().unwrap();
    let (source, library) = (directory.path().join("driver.c"), directory.path().join("libcuda.so.1"));
    // It answers the question for its identity, and crashes at the first allocation.
    let text = "#include <stdlib.h>
        #include <string.h>
        int cuDriverGetVersion(int *version) { *version = 12000; return 0; }
        int cuInit(unsigned flags) { return 0; }
        int cuGetErrorName(int code, const char **name) { *name = \"CUDA_SUCCESS\"; return code; }
        int cuDeviceGetName(char *name, int length, int device) { strncpy(name, \"none\", length); return 0; }
        int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return 0; }
        int cuCtxSetCurrent(void *context) { return 0; }
        int cuMemAlloc_v2(unsigned long long *address, unsigned long size) { abort(); }";
    std::fs::write(&source, text).unwrap();
    let status =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(status.success());
    let outcomes = run(&library, &["alloc/zero-bytes", "alloc/range", "graph/empty", "init/twice"]);
    assert_eq!(outcomes["alloc/zero-bytes"].0, "fail");
    assert!(outcomes["alloc/zero-bytes"].1.contains("signal 6"), "{:?}", outcomes["alloc/zero-bytes"]);
    assert_eq!(outcomes["graph/empty"], ("skipped".into(), "the driver has no cuGraphCreate".into()));
    assert_eq!(outcomes["init/twice"].0, "pass");
}
