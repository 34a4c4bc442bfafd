//! One small program per kind of resource (tests/programs), each run three ways: plain under ckpt-run, checkpointed
//! and left running, and checkpointed, killed with everything, and resumed. It has to pass each time, having been
//! started once.

use ckpt_run_tests::{Running, Sandbox, criu, is_full_run, programs, python, until};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The exit code of a program whose kind of resource is not available here.
const UNAVAILABLE: i32 = 77;
/// Stages of a restore at which CRIU waits for the launcher, in their order. There are two more for root.
const RESTORE_STAGES: [&str; 3] = ["pre-restore", "post-restore", "pre-resume"];
/// Each of its resumes waits a minute for its port: only a full run kills one first.
const SLOW_TO_RESUME: &str = "tcp_noreuse.py";
/// Between a snapshot and the kill.
const GAP: std::time::Duration = std::time::Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Plain,
    LeftRunning,
    Resumed,
}

fn command_line(program: &str) -> Vec<PathBuf> {
    let interpreter = if program.ends_with(".sh") { "/bin/bash".into() } else { python() };
    vec!["--".into(), interpreter, programs().join(program)]
}

fn start(sandbox: &Sandbox, program: &str) -> Running {
    sandbox.start("job", command_line(program))
}

/// Runs `program` one way; false when its kind is not available here.
fn runs(program: &str, way: Way) -> bool {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, program);
    let ready = sandbox.path().join("ready");
    loop {
        if ready.exists() {
            break;
        }
        if job.has_ended() {
            let code = job.wait();
            assert_eq!(code, UNAVAILABLE, "{program} ended before it was ready\n{}", job.said());
            return false;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    if way != Way::Plain {
        job.until_answering(&sandbox);
        job.checkpoint(&sandbox);
    }
    if way == Way::Resumed {
        fs::write(sandbox.path().join("saved"), "").unwrap();
        // What changes after the snapshot has to be rolled back: give it the time to change.
        std::thread::sleep(GAP);
        job.kill_everything();
        fs::remove_file(sandbox.path().join("saved")).unwrap();
        if is_full_run() || program != SLOW_TO_RESUME {
            kill_in_restore(&sandbox, program);
        }
        job = start(&sandbox, program);
        job.until_answering(&sandbox);
    }
    fs::write(sandbox.path().join("go"), "").unwrap();
    let code = job.wait();
    let (log, said) = (sandbox.read("log"), job.said());
    assert_eq!(code, 0, "{program} {way:?}: {log}\n{said}");
    assert_eq!(log, "started\npass\n", "{program} {way:?}\n{said}");
    assert_eq!(said.contains("resumed from snapshot"), way == Way::Resumed, "{said}");
    assert!(!said.contains("cannot set the socket option"), "{program}: {said}");
    true
}

/// A checkpoint whose CRIU was killed leaves links in the directories of the job's open files. They are in the way of the
/// next one, whose CRIU uses the same names.
#[test]
fn links_of_a_killed_checkpoint_are_removed() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "unlinked_link.py");
    job.until("ready", || sandbox.path().join("ready").exists().then_some(()));
    let left = |number: u32| sandbox.path().join(format!("link_remap.{number}"));
    fs::write(sandbox.path().join("other"), "").unwrap();
    for number in 1..=20 {
        fs::hard_link(sandbox.path().join("other"), left(number)).unwrap();
    }
    job.checkpoint(&sandbox);
    assert!((1..=20).all(|number| !left(number).exists()), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}\n{}", sandbox.read("log"), job.said());
}

#[test]
fn interrupted_calls_go_on() {
    passes("interrupted_calls.py");
}

/// CRIU has stopped all threads, and read the registers of none, when the attempt fails.
#[test]
fn an_attempt_that_fails_ends_no_call() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(command_line("interrupted_calls.py"));
    command.env("CKPT_FAULT", "dump-query-ext-files=error");
    let mut job = sandbox.start_command("job", command);
    job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    assert_eq!(sandbox.call(["checkpoint"]).status.code(), Some(1), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

#[test]
fn time_limits_end_in_a_job_that_is_saved_all_the_time() {
    // A slow machine needs more time for three checkpoints.
    let mut limits_s = [3, 10, 30, 90].into_iter();
    until("three snapshots of one job", || {
        let limit_s = limits_s.next().expect("a time limit for which there are three snapshots");
        let sandbox = Sandbox::new();
        let options = ["--interval", "200ms"].map(PathBuf::from);
        let arguments = command_line("time_limits.py").into_iter().chain([limit_s.to_string().into()]);
        let mut job = sandbox.start("job", options.into_iter().chain(arguments));
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(sandbox.read("log"), "started\npass\n");
        (job.said().matches(" saved: ").count() >= 3).then_some(())
    });
}

#[test]
fn a_criu_that_loads_no_library_is_named() {
    let sandbox = Sandbox::new();
    let program = sandbox.path().join("criu");
    fs::write(&program, format!("#!/bin/sh\nunset LD_PRELOAD\nexec '{}' \"$@\"\n", criu().display()))
        .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    for (criu, expected) in [(criu(), 0), (program, 1)] {
        let sandbox = Sandbox::new();
        let options = ["--criu".into(), criu];
        let mut job = sandbox.start("job", options.into_iter().chain(command_line("eventfd.py")));
        job.until_answering(&sandbox);
        for _ in 0..2 {
            job.checkpoint(&sandbox);
        }
        let said = job.said();
        assert_eq!(said.matches("loads no library of ckpt-run").count(), expected, "{said}");
    }
}

/// ckpt-run copies memory itself, unless CRIU loads no library. CRIU reads in one of two ways which pages there are.
#[test]
fn memory_is_copied_by_ckpt_run_or_by_criu() {
    let directory = Sandbox::new();
    let wrapper = directory.path().join("criu");
    for (line, is_copied) in [("", true), ("export CRIU_FAULT=135", true), ("unset LD_PRELOAD", false)] {
        fs::write(&wrapper, format!("#!/bin/sh\n{line}\nexec '{}' \"$@\"\n", criu().display())).unwrap();
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
        let sandbox = Sandbox::new();
        let start = || {
            let options = ["-vv".into(), "--criu".into(), wrapper.clone()];
            sandbox.start("job", options.into_iter().chain(command_line("private_memory.py")))
        };
        let mut job = start();
        job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
        job.until_answering(&sandbox);
        for _ in 0..3 {
            job.checkpoint(&sandbox);
        }
        let said = job.said();
        let of_copies = said.lines().filter_map(|line| line.split("copying ").nth(1)?.split(' ').next());
        let copied: Vec<u64> = of_copies.map(|bytes| bytes.parse().unwrap()).collect();
        assert_eq!(copied.len(), if is_copied { 3 } else { 0 }, "{line}: {said}");
        assert!(copied.iter().all(|bytes| (100 << 20..200 << 20).contains(bytes)), "{line}: {copied:?}");
        job.kill_everything();
        let mut job = start();
        job.until_answering(&sandbox);
        fs::write(sandbox.path().join("go"), "").unwrap();
        assert_eq!(job.wait(), 0, "{line}: {}\n{}", sandbox.read("log"), job.said());
        assert_eq!(sandbox.read("log"), "started\npass\n", "{line}");
        let said = job.said();
        let written = said.lines().find_map(|line| line.split_once(" bytes of memory are written into"));
        let written = written.and_then(|(before, _)| before.rsplit(' ').next()?.parse::<u64>().ok());
        assert!(written > Some(10 << 20) && !said.contains("trying once more"), "{line}: {said}");
    }
}

/// A child that moves the memory that it shares with its parent, and says at the end how much of it is still shared, KiB.
const MOVED: &str = r#"
import ctypes, os, time
SIZE, ELSEWHERE, NOHUGEPAGE = 32 << 20, 0x500000000000, 15
libc = ctypes.CDLL(None)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
place, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.mmap.argtypes = [place, length, number, number, number, ctypes.c_long]
libc.mremap.argtypes = [place, length, length, number, place]
libc.madvise.argtypes = [place, length, number]
at = libc.mmap(None, SIZE, 3, 0x22, -1, 0)
libc.madvise(at, SIZE, NOHUGEPAGE)
ctypes.memmove(at, os.urandom(SIZE), SIZE)

def shared_kib():
    found, is_inside = 0, False
    for line in open("/proc/self/smaps"):
        fields = line.split()
        if "-" in fields[0]:
            is_inside = fields[0].startswith(f"{ELSEWHERE:x}-")
        elif is_inside and fields[0] in ("Shared_Clean:", "Shared_Dirty:"):
            found += int(fields[1])
    return found

child = os.fork()
if child == 0:
    assert libc.mremap(at, SIZE, SIZE, 3, ELSEWHERE) == ELSEWHERE
    before = shared_kib()
    open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
if child == 0:
    print(before, shared_kib(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"#;

#[test]
fn a_checkpoint_takes_no_shared_pages_apart() {
    let sandbox = Sandbox::new();
    let python = python();
    let mut job = sandbox.start("job", ["-vv", "--", python.to_str().unwrap(), "-c", MOVED]);
    job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    for _ in 0..2 {
        job.checkpoint(&sandbox);
    }
    assert!(job.said().contains("copying "), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    let kib: Vec<u64> = sandbox.read("job.out").split_whitespace().map(|kib| kib.parse().unwrap()).collect();
    assert!(kib[0] >= 32 << 10 && kib[1] >= kib[0], "{kib:?}");
}

/// An alarm goes off while the job is paused: it ends the system call that it would have ended otherwise.
#[test]
fn an_alarm_during_a_checkpoint_ends_the_call() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(command_line("alarms.py"));
    command.env("CKPT_FAULT", "dump-post-dump=delay:300");
    let mut job = sandbox.start_command("job", command);
    job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    for _ in 0..3 {
        job.checkpoint(&sandbox);
    }
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// Begins a resume and kills it when CRIU has got to some stage: what it leaves may not be in the way of the next one.
fn kill_in_restore(sandbox: &Sandbox, program: &str) {
    // A full run chooses by chance, an ordinary one by the name.
    let number = if is_full_run() { fastrand::usize(..) } else { program.bytes().map(usize::from).sum() };
    let stage = RESTORE_STAGES[number % RESTORE_STAGES.len()];
    println!("{program}: a resume is killed at {stage}");
    let mut command = sandbox.command(command_line(program));
    command.env("CKPT_FAULT", format!("restore-{stage}=kill"));
    let mut killed = sandbox.start_command("job", command);
    let status = killed.wait_status();
    assert!(status.code().is_none(), "{program} at {stage}: {status}\n{}", killed.said());
}

fn passes(program: &str) {
    for way in [Way::Plain, Way::LeftRunning, Way::Resumed] {
        if !runs(program, way) {
            ckpt_test_skip::skip(format_args!("{program} is not available here"));
            return;
        }
    }
}

#[test]
fn bash_job() {
    passes("bash_job.sh");
}

/// Terminals have the lowest free number, which CRIU needs again.
#[test]
fn numbers_of_terminals_may_be_in_use_at_a_resume() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "ptys.py");
    job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let terminal = || fs::File::options().read(true).write(true).open("/dev/ptmx").unwrap();
    let _taken: Vec<_> = (0..32).map(|_| terminal()).collect();
    let mut job = start(&sandbox, "ptys.py");
    job.until_answering(&sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// CRIU has the same names in /dev/shm for the semaphores of both while it saves them.
#[test]
fn jobs_with_semaphores_are_saved_at_the_same_time() {
    let sandboxes = [Sandbox::new(), Sandbox::new()];
    let mut jobs = sandboxes.each_ref().map(|sandbox| {
        let mut command = sandbox.command(command_line("mp_spawn.py"));
        // Longer than all tries of the other one.
        command.env("CKPT_FAULT", "dump-post-dump@1=delay:2000");
        sandbox.start_command("job", command)
    });
    for (sandbox, job) in sandboxes.iter().zip(&mut jobs) {
        job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
        job.until_answering(sandbox);
    }
    std::thread::scope(|scope| {
        for (sandbox, job) in sandboxes.iter().zip(&jobs) {
            scope.spawn(move || job.checkpoint(sandbox));
        }
    });
    for (sandbox, job) in sandboxes.iter().zip(&mut jobs) {
        fs::write(sandbox.path().join("go"), "").unwrap();
        assert_eq!(job.wait(), 0, "{}", job.said());
    }
}

/// The kernel shows an empty message to the first look at a queue only, and marks it.
#[test]
fn unix_empty_messages_are_in_every_snapshot() {
    let sandbox = Sandbox::new();
    let ready = sandbox.path().join("ready");
    for _ in 0..2 {
        let mut job = start(&sandbox, "unix_empty.py");
        job.until("the program is set up", || ready.exists().then_some(()));
        job.until_answering(&sandbox);
        job.checkpoint(&sandbox);
        job.checkpoint(&sandbox);
        job.kill_everything();
    }
    let mut job = start(&sandbox, "unix_empty.py");
    job.until_answering(&sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}\n{}", sandbox.read("log"), job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// One end of each connection is restored seconds after the other one, which sends its data again meanwhile.
#[test]
fn a_connection_of_which_one_end_is_restored_late() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "tcp_unsent.py");
    job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let mut holder = Command::new(python());
    holder.arg(programs().join("lease_holder.py")).current_dir(sandbox.path()).stdout(Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let mut said = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "held");
    let mut job = start(&sandbox, "tcp_unsent.py");
    job.until_answering(&sandbox);
    assert_eq!(said.next().unwrap().unwrap(), "released");
    assert!(holder.wait().unwrap().success());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}\n{}", sandbox.read("log"), job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// A process has sent a message and closed its connection, and the other one reads slowly: the rest is in the kernel alone.
#[test]
fn a_message_whose_connection_is_closed_is_not_lost() {
    const MESSAGES: &str = "5";
    let sandbox = Sandbox::new();
    let slow = ["receiver", "sender"].map(|dir| sandbox.path().join(dir).join("slow"));
    for slow in &slow {
        fs::create_dir(slow.parent().unwrap()).unwrap();
        fs::write(slow, "").unwrap();
    }
    let script = r#"(cd receiver; exec "$@" 0 127.0.0.1 5000 $0) & (cd sender; exec "$@" 1 127.0.0.1 5000 $0); wait $!"#;
    let program = programs().join("nodes/messages.py");
    let command = ["--network", "private", "--", "sh", "-c", script, MESSAGES].map(PathBuf::from);
    let command = || command.iter().cloned().chain([python(), program.clone()]);
    let lines = |dir| sandbox.read(&format!("{dir}/messages.txt")).lines().count();
    let mut job = sandbox.start("job", command());
    job.until("a message that is sent", || (lines("sender") == 1).then_some(()));
    job.until_answering(&sandbox);
    let failed = sandbox.call(["checkpoint"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("has not received all data yet"), "{said}");
    assert_eq!(lines("receiver"), 0);
    fs::remove_file(&slow[0]).unwrap();
    job.until("the message", || (lines("receiver") == 1).then_some(()));
    job.checkpoint(&sandbox);
    job.kill_everything();
    fs::remove_file(&slow[1]).unwrap();
    let mut job = sandbox.start("again", command());
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!([lines("receiver"), lines("sender")], [5, 5]);
}

macro_rules! programs {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            passes(concat!(stringify!($name), ".py"));
        })*

        /// Every program is listed, so that none is left out.
        #[test]
        fn every_program_is_run() {
            let listed = [$(concat!(stringify!($name), ".py")),*];
            let elsewhere =
                ["harness.py", "linux.py", "ctty.py", "stdin_data.py", "bash_job.sh", "hanging_mount.py", "steady.py", "pair.py", "lease_holder.py", "interrupted_calls.py", "alarms.py", "time_limits.py"];
            for entry in std::fs::read_dir(programs()).unwrap() {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                let known = listed.contains(&&*name) || elsewhere.contains(&&*name);
                assert!(known || entry.file_type().unwrap().is_dir(), "{name}");
            }
        }
    };
}

programs!(
    affinity,
    append_log,
    asyncio_loop,
    clocks,
    daemonised,
    deep_tree,
    dirty_memory,
    epoll,
    eventfd,
    fifo,
    file_gone,
    file_offset,
    flock,
    huge_pages,
    inotify,
    itimer,
    lease,
    memfd,
    mmap_file,
    mp_fork,
    mp_forkserver,
    mp_spawn,
    ofd_lock,
    orphan,
    pidfd,
    pipe,
    plain_log,
    posix_lock,
    posix_sem,
    posix_timer,
    prctl,
    private_memory,
    process_groups,
    ptys,
    rng,
    sched_policy,
    shm_anon,
    shm_named,
    shm_unlinked,
    signalfd,
    signals,
    socket_options,
    subprocess_pipe,
    sysv_sem,
    sysv_shm,
    tcp,
    tcp6,
    tcp_half_closed,
    tcp_noreuse,
    tcp_unsent,
    threads300,
    timerfd,
    timerfd_expired,
    udp,
    unix_gone,
    umask_cwd,
    unix_dgram,
    unix_empty,
    unix_named,
    unix_rights,
    unix_rights_between,
    unix_seqpacket,
    unix_stream,
    unlinked_file,
    unlinked_link,
    uvloop_loop,
    zombie,
);
