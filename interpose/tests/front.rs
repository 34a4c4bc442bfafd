//! In front of the driver: every route by which programs find it, what stands at each entry point, and what happens
//! where a program gets past. The launcher is played by the test; the driver is simcuda, or one that only counts.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ckpt_protocol::agent::{FromAgent, Hello, SOCKET_VARIABLE};
use common::launcher::{Agent, Launcher};
use common::program::{self, Program};
use common::{driver, library};
use cuda_abi::{Class, ENTRY_POINTS, Lookup, lookup};

#[path = "front/nccl.rs"]
mod nccl;
#[path = "front/ranks.rs"]
mod ranks;

/// What each entry point's class is meant to be: a row that is lost, or has become another, shows.
const CLASSES: &str = include_str!("entry_points.txt");

/// What handlers of other entry points ask the driver about.
const ASKED: &[&str] = &["cuCtxGetCurrent"];

/// Compiles a program of `tests/programs` into the launcher's directory.
fn compile(launcher: &Launcher, source: &str, output: &str, options: &[&str]) -> PathBuf {
    let path = launcher.path(output);
    let place = format!("-I{}", launcher.directory.path().display());
    let source = Path::new("programs").join(source);
    program::compile(source, &path, &[&[&*place, "-rdynamic"], options].concat());
    path
}

fn compile_with_driver(launcher: &Launcher, source: &str, output: &str, more: &[&str]) -> PathBuf {
    let path = driver();
    let options = [more, &[path.to_str().expect("text")]].concat();
    compile(launcher, source, output, &options)
}

/// A command that finds the driver; without the interposer.
fn plain(launcher: &Launcher, program: &Path) -> Command {
    let mut command = program::plain(program, &launcher.path("devices"));
    command.env("SIMCUDA_MEMORY", "64MiB");
    command
}

fn preloaded(launcher: &Launcher, program: &Path) -> Command {
    let mut command = plain(launcher, program);
    program::interpose(&mut command, &launcher.socket());
    command
}

fn agent_of(launcher: &Launcher, program: &Program) -> Agent {
    launcher.next_that("the program's agent", |hello| hello.pid == program.pid())
}

/// Has the path of the socket gone while agents are away, as the launcher does it; returns them when they are back.
fn while_away(launcher: &mut Launcher, agents: Vec<Agent>, work: impl FnOnce()) -> Vec<Agent> {
    launcher.stop_listening();
    let pids: BTreeSet<u32> = agents.iter().map(|agent| agent.hello.pid).collect();
    for agent in agents {
        agent.goes_away(1);
    }
    work();
    launcher.listen();
    let is_away = |hello: &Hello| hello.away == Some(1);
    let back: Vec<Agent> =
        pids.iter().map(|_| launcher.next_that("an agent that is back", is_away)).collect();
    back.iter().for_each(|agent| agent.is_back(1));
    assert_eq!(back.iter().map(|agent| agent.hello.pid).collect::<BTreeSet<_>>(), pids);
    back
}

fn class_name(class: Option<Class>) -> &'static str {
    match class {
        Some(Class::Virtualise) => "virtualise",
        Some(Class::Track) => "track",
        Some(Class::Gate) => "gate",
        Some(Class::Leave) => "leave",
        Some(Class::Taint) => "taint",
        None => "legacy",
    }
}

/// What an agent answers that cannot take its process away.
fn refusal(agent: &Agent, attempt: u64) -> String {
    match agent.quiesce(attempt) {
        FromAgent::Failed { attempt: of, reason, is_lost: false } if of == attempt => reason,
        answer => panic!("{answer:?}"),
    }
}

/// Before 570 only another program could do it.
#[test]
fn a_driver_without_checkpoints_is_refused_with_what_is_needed() {
    let launcher = Launcher::new();
    let soname = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    let old = compile(&launcher, "old_driver.c", "libcuda.so.1", &soname);
    let program = compile(&launcher, "initialises.c", "initialises", &[old.to_str().expect("text")]);
    let mut command = preloaded(&launcher, &program);
    command.env("LD_LIBRARY_PATH", launcher.directory.path());
    let mut program = Program::start(command);
    assert_eq!(program.line(), "ready");
    let agent = agent_of(&launcher, &program);
    let reason = refusal(&agent, 1);
    let module = fs::read_to_string("/sys/module/nvidia/version").map(|text| format!(" {}", text.trim()));
    let found =
        format!("the driver{} (CUDA 12.4) has no cuCheckpointProcessLock: ", module.unwrap_or_default());
    assert!(
        reason.starts_with(&found) && reason.contains("NVIDIA's driver 570 (CUDA 12.8) or newer"),
        "{reason}"
    );
    assert_eq!(program.ends(), Some(0));
}

/// Some drivers that have the calls do not support them on every machine.
#[test]
fn a_driver_that_does_not_support_checkpoints_is_refused_with_what_is_needed() {
    let launcher = Launcher::new();
    let program = compile_with_driver(&launcher, "initialises.c", "initialises", &[]);
    let mut command = preloaded(&launcher, &program);
    command.env("SIMCUDA_FAULT", "cuCheckpointProcessLock:1+=CUDA_ERROR_NOT_SUPPORTED");
    command.env("SIMCUDA_DRIVER", "570");
    let mut program = Program::start(command);
    assert_eq!(program.line(), "ready");
    let agent = agent_of(&launcher, &program);
    let reason = refusal(&agent, 1);
    let call = "cuCheckpointProcessLock failed with CUDA_ERROR_NOT_SUPPORTED (801): the driver";
    assert!(reason.starts_with(call), "{reason}");
    assert!(reason.contains("(CUDA 12.8) does not support it here"), "{reason}");
    assert_eq!(program.ends(), Some(0));
}

#[test]
fn the_table_has_each_entry_point_with_its_class() {
    let symbols = ENTRY_POINTS.iter().flat_map(|row| {
        let names = std::iter::once(row.symbol).chain(row.per_thread.map(|(name, _)| name));
        names.map(|name| format!("{} {name}", class_name(row.class)))
    });
    let table: BTreeSet<String> = symbols.collect();
    let meant: BTreeSet<String> = CLASSES.lines().map(str::to_owned).collect();
    let missing: Vec<_> = meant.difference(&table).collect();
    let new: Vec<_> = table.difference(&meant).collect();
    assert!(missing.is_empty() && new.is_empty(), "no longer there: {missing:#?}; not in the list: {new:#?}");
}

/// Each entry point by its exported symbol, called while the gate is closed: those that may change what a checkpoint
/// saves wait and do not reach the driver, the others pass, and in the end each has been called once.
#[test]
fn at_a_closed_gate_each_entry_point_does_what_its_class_says() {
    let mut launcher = Launcher::new();
    let classes: BTreeMap<&str, &str> = CLASSES
        .lines()
        .map(|line| line.split_once(' ').expect("a class and a name"))
        .map(|(class, name)| (name, class))
        .collect();
    let (typed, legacy): (Vec<_>, Vec<_>) = classes.iter().partition(|(_, class)| **class != "legacy");
    let rows = typed.iter().chain(&legacy).map(|(name, _)| format!("ROW({name})\n"));
    let rows = format!("#undef TYPED\n#define TYPED {}\n{}", typed.len(), rows.collect::<String>());
    fs::write(launcher.path("symbols.h"), rows).expect("written");
    let soname = ["-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1"];
    let fake = compile(&launcher, "fake_driver.c", "libcuda.so.1", &soname);
    let program = compile(&launcher, "matrix.c", "matrix", &[fake.to_str().expect("text"), "-lpthread"]);
    let mut command = preloaded(&launcher, &program);
    command.env("LD_LIBRARY_PATH", launcher.directory.path());
    let mut program = Program::start(command);
    assert_eq!(program.line(), "ready");
    let agent = agent_of(&launcher, &program);
    while_away(&mut launcher, vec![agent], || {
        program.say("call");
        let lines = program.lines_until("settled");
        let expected = classes.iter().map(|(name, class)| match *class {
            "leave" => format!("passed {name} 1"),
            _ => format!("parked {name} 0"),
        });
        assert_eq!(lines.iter().cloned().collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>());
    });
    program.say("end");
    let called: BTreeSet<String> = program.lines_until("").into_iter().collect();
    let once: BTreeSet<String> = classes.keys().map(|name| format!("called {name} 1")).collect();
    // What handlers ask the driver about has no effect.
    let is_asked = |line: &&String| !ASKED.iter().any(|name| line.starts_with(&format!("called {name} ")));
    let other: Vec<_> = once.symmetric_difference(&called).filter(is_asked).collect();
    assert!(other.is_empty(), "{other:#?}");
    assert_eq!(program.ends(), Some(0));
}

/// What `routes` prints, by route.
fn routes(mut command: Command, driver: &Path, queries: &str) -> BTreeMap<String, String> {
    command.arg(driver);
    let mut program = Program::start(command);
    let mut input = program.input.take().expect("a pipe");
    let queries = queries.to_owned();
    let writer = std::thread::spawn(move || input.write_all(queries.as_bytes()).expect("written"));
    let lines = program.lines_until("");
    writer.join().expect("written");
    assert_eq!(program.ends(), Some(0), "{lines:?}");
    let route =
        |line: String| line.split_once(": ").map(|(route, found)| (route.to_owned(), found.to_owned()));
    lines.into_iter().map(|line| route(line).expect("a route")).collect()
}

/// Names, versions and flags to ask cuGetProcAddress for: each name at each version at which any name has a new function,
/// and just before it.
fn queries() -> Vec<(&'static str, u32, u64)> {
    let names = || ENTRY_POINTS.iter().filter(|row| !row.public_name.is_empty());
    let since = names().flat_map(|row| [Some(row.since), row.per_thread.map(|(_, since)| since)]).flatten();
    let versions: BTreeSet<u32> = since.flat_map(|version| [version - 10, version]).chain([13000]).collect();
    let mut queries = vec![("cuNoSuchFunction", 13000, 0), ("cuMemAlloc_v2", 13000, 0), ("cuInit", 0, 0)];
    for name in names().map(|row| row.public_name).collect::<BTreeSet<_>>() {
        for version in &versions {
            queries.extend([0, 1, 2].map(|flags| (name, *version, flags)));
        }
    }
    queries
}

fn as_text(queries: &[(&str, u32, u64)]) -> String {
    queries.iter().map(|(name, version, flags)| format!("{name} {version} {flags}\n")).collect()
}

/// Every symbol of the table for dlsym: a test of cuda-abi shows that NVIDIA's library exports no other ones.
fn symbols() -> String {
    let names = ENTRY_POINTS
        .iter()
        .flat_map(|row| [Some(row.symbol), row.per_thread.map(|(symbol, _)| symbol)].into_iter().flatten());
    names.map(|symbol| format!("{symbol} -1 0\n")).collect()
}

/// Runs `routes` with a driver of the version `newest` under one file name, plain and with the interposer.
fn look_up_everything(launcher: &Launcher, driver: &Path, newest: u32) {
    let program = compile(launcher, "routes.c", "routes", &["-ldl"]);
    let queries = queries();
    let text = as_text(&queries) + &symbols();
    let plain = routes(plain(launcher, &program), driver, &text);
    let with = routes(preloaded(launcher, &program), driver, &text);
    assert!(with.keys().eq(plain.keys()));
    let file = driver.file_name().and_then(|name| name.to_str()).expect("text");
    for (route, found) in &plain {
        // The driver's function has become ours of the same name, and nothing else is another one.
        let expected = match found.strip_prefix(file) {
            Some(name) => format!("libckpt_interpose.so{name}"),
            None => found.clone(),
        };
        // A driver that only others can see is seen through the default scope, since we are in that.
        let is_scope = route.starts_with("local default cu") || route.starts_with("local next cu");
        if is_scope && found == "none" && !route.ends_with("cuNoSuchFunction") {
            assert!(with[route].starts_with("libckpt_interpose.so "), "{route}: {}", with[route]);
        } else {
            assert_eq!(with[route], expected, "{route}");
        }
    }
    assert_eq!(with["handle"], "libckpt_interpose.so cuInit");
    for (name, version, flags) in queries {
        // What the driver hands out to a program of this version.
        let (Lookup::Found(symbol), true) = (lookup(name, version, flags == 2), version <= newest) else {
            continue;
        };
        let route = format!("v2 {name} {version} {flags} = 0, 0");
        let Some(found) = with.get(&route) else { continue };
        assert_eq!(found, &format!("libckpt_interpose.so {symbol}"), "{route}");
    }
    let handed_out = with.keys().filter(|route| route.starts_with("v2 cu") && route.ends_with("= 0, 0"));
    assert!(handed_out.count() > 400);
    let exported = with.iter().filter(|(route, found)| route.starts_with("symbol ") && *found != "none");
    assert!(exported.count() > 600);
}

#[test]
fn every_route_leads_to_us() {
    let launcher = Launcher::new();
    look_up_everything(&launcher, &driver(), 13000);
}

/// NVIDIA's own library 550, which needs no GPU for look-ups.
fn nvidias_driver() -> PathBuf {
    let default = "../target/tools/libcuda/prefix/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1";
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join(default);
    let library = std::env::var_os("CKPT_TEST_NVIDIA_LIBCUDA").map_or_else(default, Into::into);
    assert!(library.is_file(), "{} is not there: call `cargo xtask test`", library.display());
    library
}

#[test]
fn every_route_to_nvidias_driver_leads_to_us() {
    look_up_everything(&Launcher::new(), &nvidias_driver(), 12040);
}

/// Every name, at every version at which any answer changes and before it, by both forms of the call.
#[test]
fn the_simulated_driver_finds_what_nvidias_finds() {
    let launcher = Launcher::new();
    let program = compile(&launcher, "routes.c", "routes", &["-ldl"]);
    let queries = as_text(&queries());
    let answers = |driver: &Path| {
        let mut command = plain(&launcher, &program);
        command.env("SIMCUDA_DRIVER", "550");
        let mut found = routes(command, driver, &queries);
        found.retain(|route, _| route.starts_with('v'));
        found
    };
    let (simulated, nvidias) = (answers(&driver()), answers(&nvidias_driver()));
    let different: Vec<_> = nvidias
        .iter()
        .filter(|(route, found)| simulated.get(*route) != Some(*found))
        .map(|(route, found)| format!("{route}: {found}; simulated: {:?}", simulated.get(route)))
        .collect();
    assert!(nvidias.len() > 3 * 30_960, "{}", nvidias.len());
    let first = &different[..different.len().min(20)];
    assert!(different.is_empty(), "{} of {}: {first:#?}", different.len(), nvidias.len());
}

#[test]
fn a_driver_under_another_name_is_known_by_its_soname() {
    let launcher = Launcher::new();
    let copy = launcher.path("renamed.so");
    fs::copy(driver(), &copy).expect("copied");
    look_up_everything(&launcher, &copy, 13000);
}

#[test]
fn other_preloaded_libraries_are_not_given_themselves() {
    let launcher = Launcher::new();
    let wrapper = compile(&launcher, "wrapper.c", "wrapper.so", &["-shared", "-fPIC", "-ldl"]);
    let program = compile_with_driver(&launcher, "direct.c", "direct", &["-ldl"]);
    let both = |first: &Path, second: &Path| format!("{}:{}", first.display(), second.display());
    // Before us, it is what the program calls.
    let mut command = preloaded(&launcher, &program);
    command.env("LD_PRELOAD", both(&wrapper, &library()));
    let mut running = Program::start(command);
    assert_eq!(running.line(), "wrapper: next is ours, marker none");
    assert_eq!(running.line(), "direct: ours");
    assert_eq!(running.ends(), Some(0));
    // Behind us, what a look for the next one finds.
    let source = launcher.path("next.c");
    let text = "#define _GNU_SOURCE\n#include <dlfcn.h>\nint main(void) { return \
                ((int (*)(unsigned))dlsym(RTLD_NEXT, \"cuInit\"))(0); }\n";
    fs::write(&source, text).expect("written");
    let options = ["-Wl,--no-as-needed", "-ldl"];
    let program = compile_with_driver(&launcher, source.to_str().expect("text"), "next", &options);
    let mut command = preloaded(&launcher, &program);
    command.env("LD_PRELOAD", both(&library(), &wrapper));
    let mut running = Program::start(command);
    assert_eq!(running.line(), "wrapper: next is ours, marker none");
    assert_eq!(running.ends(), Some(0));
}

#[test]
fn the_child_of_a_fork_has_no_state_and_says_so() {
    let mut launcher = Launcher::new();
    let program = compile_with_driver(&launcher, "direct.c", "direct", &["-ldl"]);
    let mut command = preloaded(&launcher, &program);
    command.arg("fork");
    let mut running = Program::start(command);
    assert_eq!([running.line(), running.line()], ["direct: ours", "child"]);
    let parent = agent_of(&launcher, &running);
    let child = launcher.next_that("the child's agent", |hello| hello.pid != running.pid());
    while_away(&mut launcher, vec![parent, child], || {});
    assert_eq!(running.ends(), Some(0));
}

#[test]
fn a_driver_that_is_used_past_us_is_refused_by_its_name() {
    let launcher = Launcher::new();
    let user = compile_with_driver(&launcher, "user.c", "user.so", &["-shared", "-fPIC"]);
    let program = compile(&launcher, "bypass.c", "bypass", &["-ldl"]);
    for how in ["deepbind", "dlmopen"] {
        for what in ["load", "use"] {
            let mut command = preloaded(&launcher, &program);
            command.args([what, how]).arg(&user);
            let mut running = Program::start(command);
            assert_eq!(running.line(), "ready", "{what} {how}");
            let answer = agent_of(&launcher, &running).quiesce(1);
            match (what, answer) {
                ("load", FromAgent::Quiesced { attempt: 1, .. }) => {}
                ("use", FromAgent::Failed { attempt: 1, reason, .. }) => {
                    let real = fs::canonicalize(driver()).expect("a path");
                    let names = ["libcuda.so.1", real.to_str().expect("text")];
                    assert!(names.iter().any(|name| reason.contains(name)), "{reason}");
                    assert!(reason.contains("RTLD_DEEPBIND or dlmopen"), "{reason}");
                    // Harmless, but for the checkpoint.
                    assert_eq!(running.ends(), Some(0));
                }
                (what, answer) => panic!("{what} {how}: {answer:?}"),
            }
        }
    }
}

/// Its functions cannot be called before that: a process of the job ended by a segmentation fault.
#[test]
fn a_driver_that_is_being_relocated_is_not_asked() {
    let launcher = Launcher::new();
    let soname = ["-shared", "-fPIC", "-fno-stack-protector", "-Wl,-soname,libcuda.so.1,-z,relro,-z,now"];
    let driver = compile(&launcher, "relocating.c", "libcuda.so.1", &soname);
    let program = compile(&launcher, "opens.c", "opens", &["-ldl"]);
    let mut command = preloaded(&launcher, &program);
    command.arg(driver);
    let mut running = Program::start(command);
    assert_eq!(running.line(), "ready");
    let answer = agent_of(&launcher, &running).quiesce(1);
    assert!(matches!(answer, FromAgent::Quiesced { attempt: 1, .. }), "{answer:?}");
}

/// Starts a command that in some way starts `sleep` with another environment, which has an agent nevertheless.
fn sleep_is_in_the_job(launcher: &Launcher, command: Command, how: &str) {
    let _running = Program::start(command);
    let agent = launcher.next_that(how, |hello| hello.exe.ends_with("/sleep"));
    let environment = fs::read(format!("/proc/{}/environ", agent.hello.pid)).expect("a process");
    let mut names: Vec<_> = environment.split(|byte| *byte == 0).filter(|entry| !entry.is_empty()).collect();
    names.retain(|entry| !entry.starts_with(b"LC_CTYPE="));
    let socket = format!("{SOCKET_VARIABLE}={}", launcher.socket().display());
    let preload = format!("LD_PRELOAD={}", library().display());
    assert_eq!(names, [&b"ONLY=1"[..], socket.as_bytes(), preload.as_bytes()], "{how}");
}

#[test]
fn programs_started_with_another_environment_stay_in_the_job() {
    let launcher = Launcher::new();
    let program = compile(&launcher, "exec.c", "exec", &[]);
    let ways = ["execve", "execvpe", "execle", "fexecve", "execveat", "vfork", "posix_spawn", "posix_spawnp"];
    for how in ways.into_iter().chain(["execv", "execvp", "execl", "execlp"]) {
        let mut command = preloaded(&launcher, &program);
        command.arg(how);
        sleep_is_in_the_job(&launcher, command, how);
    }
    let mut command = preloaded(&launcher, Path::new("/usr/bin/env"));
    command.args(["-i", "ONLY=1", "/bin/sleep", "1000"]);
    sleep_is_in_the_job(&launcher, command, "env -i");
}

#[test]
fn children_of_python_with_another_environment_stay_in_the_job() {
    let launcher = Launcher::new();
    let ways = [
        "subprocess.run(['/bin/sleep', '1000'], env={'ONLY': '1'})",
        "subprocess.run(['/bin/sleep', '1000'], env={'ONLY': '1'}, preexec_fn=lambda: None)",
        "os.waitpid(os.posix_spawn('/bin/sleep', ['sleep', '1000'], {'ONLY': '1'}), 0)",
        "os.execve('/bin/sleep', ['sleep', '1000'], {'ONLY': '1'})",
    ];
    for how in ways {
        let mut command = preloaded(&launcher, Path::new("/usr/bin/python3"));
        command.args(["-c", &format!("import os, subprocess\n{how}")]);
        sleep_is_in_the_job(&launcher, command, how);
    }
}

/// Ranks that torchrun has started, all on this machine, use loopback, unless the user has chosen.
#[test]
fn nccl_of_one_machine_uses_loopback() {
    const HERE: &[(&str, &str)] = &[("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8")];
    const ELSEWHERE_TOO: &[(&str, &str)] = &[("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8")];
    let launcher = Launcher::new();
    let script =
        "import os; print(os.environ.get('NCCL_SOCKET_IFNAME')); os.system('echo $NCCL_SOCKET_IFNAME')";
    for (ranks, user, expected) in [
        (HERE, None, "lo\nlo\n"),
        (HERE, Some(("NCCL_SOCKET_IFNAME", "eth0")), "eth0\neth0\n"),
        (HERE, Some(("NCCL_COMM_ID", "192.0.2.1:5000")), "None\n\n"),
        (ELSEWHERE_TOO, None, "None\n\n"),
        (&[], None, "None\n\n"),
    ] {
        let mut command = preloaded(&launcher, Path::new("/usr/bin/python3"));
        command.args(["-c", script]).env_remove("NCCL_SOCKET_IFNAME");
        command.envs(ranks.iter().copied()).envs(user);
        let output = command.output().expect("started");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{ranks:?} {user:?}");
    }
}

#[test]
fn a_program_that_cannot_be_started_is_an_error_as_before() {
    let launcher = Launcher::new();
    let program = compile(&launcher, "exec.c", "exec", &[]);
    let run = |mut command: Command| command.arg("fails").output().expect("started");
    let (plain, with) = (run(plain(&launcher, &program)), run(preloaded(&launcher, &program)));
    assert_eq!(plain.status.code(), Some(5));
    assert_eq!(with, plain);
}

/// A module of Python's, for instance, whose scope nobody else sees.
#[test]
fn a_library_finds_us_in_a_scope_of_its_own() {
    let launcher = Launcher::new();
    let user = compile_with_driver(&launcher, "user.c", "user.so", &["-shared", "-fPIC"]);
    let script = "import ctypes, sys; user = ctypes.CDLL(sys.argv[1]); print(user.in_scope(), user.behind())";
    let run = |mut command: Command| {
        let result = command.args(["-c", script]).arg(&user).output().expect("started");
        String::from_utf8_lossy(&result.stdout).trim_end().to_owned()
    };
    let python = Path::new("/usr/bin/python3");
    assert_eq!(run(plain(&launcher, python)), "1 1");
    assert_eq!(run(preloaded(&launcher, python)), "2 2");
}

/// The dynamic loader leaves us out of a program that has more rights than its user. What the launcher says to such a
/// process is its part.
#[test]
fn a_set_user_id_program_runs_without_us() {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        ckpt_test_skip::skip("only root can make such a program");
        return;
    }
    let launcher = Launcher::new();
    let program = launcher.path("sleep");
    fs::copy("/bin/sleep", &program).expect("copied");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("set");
    fs::set_permissions(launcher.directory.path(), fs::Permissions::from_mode(0o755)).expect("set");
    let mut command = preloaded(&launcher, &program);
    command.arg("1000").uid(65534).gid(65534);
    let running = Program::start(command);
    running.falls_asleep();
    let maps = fs::read_to_string(format!("/proc/{}/maps", running.pid())).expect("maps");
    assert!(maps.contains("libc"), "{maps}");
    assert!(!maps.contains("libckpt_interpose"), "{maps}");
    assert!(launcher.try_accept().is_none());
}
