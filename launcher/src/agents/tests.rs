//! Tests that play the part of agents.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, ToAgent};
use ckpt_protocol::frame::{self, FrameError};
use rustix::process::Pid;

use super::process::{DetachedProcess, ProcessHandle, pidfd};
use super::*;

/// Timeout for events that have to happen.
pub(super) const LONG: Duration = Duration::from_secs(300);
/// Time to wait for events that must not happen.
pub(super) const SHORT: Duration = Duration::from_millis(60);
/// Long enough for an agent that answers, short enough to wait for one that does not.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn socket_dir() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("agents");
    (directory, path)
}

pub(super) fn until<T>(what: &str, attempt: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn until_count(agents: &Agents, count: usize) {
    until("agents", || (agents.count() == count).then_some(()));
}

pub(super) fn hello(pid: u32, away: Option<u64>) -> FromAgent {
    let exe = format!("/bin/{pid}");
    FromAgent::Hello(Hello {
        version: PROTOCOL_VERSION,
        pid,
        start_time_ticks: 1,
        exe,
        away,
        is_detached: false,
        supports_activity: false,
        supports_release: false,
        supports_cut: false,
        supports_reads: false,
        supports_loads: false,
        parks_by_key: true,
        instance: 0,
    })
}

pub(super) fn send(mut stream: &UnixStream, message: &FromAgent) {
    frame::write(&mut stream, message).expect("sent");
}

pub(super) fn receive(mut stream: &UnixStream) -> Result<ToAgent, FrameError> {
    frame::read(&mut stream)
}

/// Connects once the launcher listens; the connection has a read timeout.
pub(super) fn connect(path: &Path) -> UnixStream {
    let stream = until("the launcher", || UnixStream::connect(path).ok());
    stream.set_read_timeout(Some(LONG)).expect("set");
    stream
}

/// A launcher's side, and agents with these IDs that are registered there.
pub(super) fn agents_with<const COUNT: usize>(
    pids: [u32; COUNT],
) -> (tempfile::TempDir, PathBuf, Arc<Agents>, [UnixStream; COUNT]) {
    let (directory, path) = socket_dir();
    let agents = Arc::new(Agents::listen(&path, LONG).expect("listening"));
    let streams = pids.map(|pid| connect_agent(&path, pid, None));
    until_count(&agents, COUNT);
    (directory, path, agents, streams)
}

/// Connects as an agent once the launcher listens; returns after the welcome.
pub(super) fn connect_agent(path: &Path, pid: u32, away: Option<u64>) -> UnixStream {
    let stream = connect(path);
    send(&stream, &hello(pid, away));
    assert_eq!(receive(&stream).expect("an answer"), ToAgent::Welcome { version: PROTOCOL_VERSION });
    stream
}

pub(super) fn return_agent(path: &Path, pid: u32, attempt: u64, restored: bool) -> UnixStream {
    let stream = connect_agent(path, pid, Some(attempt));
    send(&stream, &FromAgent::Reconnected { attempt, restored, copied_bytes: 0, lost: None });
    stream
}

/// Receives a Quiesce; returns its timeout.
pub(super) fn expect_quiesce(stream: &UnixStream, wanted: u64) -> Duration {
    let ToAgent::Quiesce { attempt, timeout_ms, .. } = receive(stream).expect("a request") else {
        panic!("not a request");
    };
    assert_eq!(attempt, wanted);
    Duration::from_millis(timeout_ms)
}

fn detach(stream: &UnixStream, attempt: u64) {
    expect_quiesce(stream, attempt);
    send(stream, &FromAgent::Quiesced { attempt, gpu: None });
}

fn refuse(stream: &UnixStream, attempt: u64) {
    expect_quiesce(stream, attempt);
    send(stream, &FromAgent::Failed { attempt, reason: format!("managed memory {attempt}"), is_lost: false });
}

/// Starts an agent that detaches when it is asked to.
fn detaching_agent(path: &Path, pid: u32, attempt: u64) -> JoinHandle<()> {
    let stream = connect_agent(path, pid, None);
    thread::spawn(move || detach(&stream, attempt))
}

fn pids(processes: &[Process]) -> Vec<Option<u32>> {
    let mut pids: Vec<_> = processes.iter().map(|process| process.pid).collect();
    pids.sort();
    pids
}

/// Connects agents 1 to `count` and detaches them for attempt 1.
fn detach_all(agents: &Agents, path: &Path, count: u32) -> Quiesced {
    let threads: Vec<_> = (1..=count).map(|pid| detaching_agent(path, pid, 1)).collect();
    let quiesced = agents.quiesce(1, LONG).expect("quiesced");
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    quiesced
}

#[test]
fn all_agents_detach_and_return() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let quiesced = detach_all(&agents, &path, 3);
    assert_eq!(quiesced.attempt(), 1);
    let detached: Vec<_> = quiesced.processes().cloned().collect();
    assert_eq!(pids(&detached), [Some(1), Some(2), Some(3)]);
    assert_eq!(detached[0].host_pid, Some(std::process::id()));
    assert_eq!(agents.count(), 0);
    assert!(!path.exists());

    agents.resume_listening().expect("listening again");
    let streams =
        [return_agent(&path, 1, 1, false), return_agent(&path, 2, 1, true), return_agent(&path, 3, 1, false)];
    let returned = agents.await_return(&quiesced, LONG);
    assert_eq!(returned, ReturnSummary { continued: 2, restored: 1, ..ReturnSummary::default() });
    assert_eq!(agents.count(), 3);

    // And again.
    let threads = streams.map(|stream| thread::spawn(move || detach(&stream, 2)));
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 3);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}

#[test]
fn quiesce_succeeds_without_agents() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let quiesced = agents.quiesce(1, Duration::ZERO).expect("quiesced");
    assert!(matches!(agents.quiesce(2, LONG), Err(QuiesceError::NotListening)));
    agents.resume_listening().expect("listening again");
    agents.resume_listening().expect("still listening");
    assert_eq!(agents.await_return(&quiesced, Duration::ZERO), ReturnSummary::default());
}

#[test]
fn an_agent_that_does_not_answer_is_named_and_all_agents_can_be_asked_again() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let slow = connect_agent(&path, 7, None);
    let detaching = detaching_agent(&path, 8, 1);
    let error = agents.quiesce(1, ANSWER_TIMEOUT).expect_err("one does not answer");
    let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(pids(unanswered), [Some(7)]);
    let text = error.to_string();
    assert!(text.contains("process 7 of the job") && text.contains("/bin/7"), "{text}");
    detaching.join().expect("an agent");
    assert_eq!(agents.count(), 1);

    // The first agent answers the aborted attempt at last; the other one has returned.
    let other = return_agent(&path, 8, 1, false);
    until_count(&agents, 2);
    let late = thread::spawn(move || detach(&slow, 1));
    late.join().expect("an agent");
    until_count(&agents, 1);
    let slow = return_agent(&path, 7, 1, false);
    until_count(&agents, 2);
    let slow = thread::spawn(move || detach(&slow, 2));
    let other = thread::spawn(move || detach(&other, 2));
    let quiesced = agents.quiesce(2, LONG).expect("quiesced");
    [slow, other].into_iter().for_each(|thread| thread.join().expect("an agent"));
    let detached: Vec<_> = quiesced.processes().cloned().collect();
    assert_eq!(pids(&detached), [Some(7), Some(8)]);
}

#[test]
fn a_connection_without_a_hello_is_waited_for() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let shy = UnixStream::connect(&path).expect("connected");
    let error = agents.quiesce(1, SHORT).expect_err("the agent is unknown");
    let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(pids(unanswered), [None]);
    assert_eq!(unanswered[0].host_pid, Some(std::process::id()));

    let shy = thread::spawn(move || {
        thread::sleep(SHORT);
        send(&shy, &hello(5, None));
        assert!(matches!(receive(&shy), Ok(ToAgent::Welcome { .. })));
        detach(&shy, 2);
    });
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 1);
    shy.join().expect("an agent");
}

#[test]
fn connections_made_while_listening_ends_are_known_or_refused() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    for attempt in 0..30 {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::SeqCst) {
                        let Ok(stream) = UnixStream::connect(&path) else { continue };
                        send(&stream, &hello(1, None));
                        assert!(matches!(receive(&stream), Ok(ToAgent::Welcome { .. })));
                        detach(&stream, attempt);
                        return;
                    }
                });
            }
            let quiesced = agents.quiesce(attempt, LONG).expect("quiesced");
            is_over.store(true, Ordering::SeqCst);
            assert!(quiesced.processes().len() <= 4);
        });
        agents.resume_listening().expect("listening again");
    }
}

#[test]
fn a_process_that_exits_is_not_waited_for() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let exits = connect_agent(&path, 1, None);
    let exits = thread::spawn(move || {
        expect_quiesce(&exits, 1);
    });
    assert_eq!(agents.quiesce(1, LONG).expect("quiesced").processes().len(), 0);
    exits.join().expect("an agent");
}

/// An idle process that stands for one of the job.
fn other_process() -> Child {
    Command::new("sleep").arg("1000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a process")
}

fn detached_process(child: &Child) -> DetachedProcess {
    let host_pid = Some(child.id());
    let pidfd = Pid::from_raw(i32::try_from(child.id()).expect("fits")).and_then(pidfd);
    let handle = ProcessHandle::new(pidfd, format!("/proc/{}", child.id()).into());
    let process = Process { pid: Some(9), host_pid, exe: String::new() };
    DetachedProcess { process, handle: Arc::new(handle), report: None, supports_loads: false }
}

#[test]
fn a_process_that_exits_while_detached_is_not_waited_for() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let mut child = other_process();
    let quiesced = Quiesced { attempt: 1, detached: vec![detached_process(&child)], gpu: Vec::new() };
    let returned = agents.await_return(&quiesced, SHORT);
    assert_eq!(pids(&returned.missing), [Some(9)]);
    child.kill().expect("killed");
    assert_eq!(agents.await_return(&quiesced, LONG), ReturnSummary::default());
    child.wait().expect("reaped");
}

#[test]
fn another_program_in_the_same_process_is_not_the_agent_that_detached() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let quiesced = detach_all(&agents, &path, 1);
    agents.resume_listening().expect("listening again");
    let _new_program = connect_agent(&path, 1, None);
    assert_eq!(agents.await_return(&quiesced, LONG), ReturnSummary::default());
}

#[test]
fn a_restoring_launcher_waits_for_the_processes_of_the_snapshot() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let proc = tempfile::tempdir().expect("a directory");
    for pid in ["1", "2", "3"] {
        fs::create_dir(proc.path().join(pid)).expect("a directory");
        fs::write(proc.path().join(pid).join("exe"), pid).expect("a program");
    }
    let quiesced = Quiesced::expected(6, [1, 2, 3, 4], proc.path());
    assert_eq!(quiesced.processes().len(), 3, "one has exited already");
    let streams = [return_agent(&path, 3, 6, true), return_agent(&path, 1, 6, true)];
    until_count(&agents, 2);
    let returned = agents.await_return(&quiesced, SHORT);
    assert_eq!((returned.restored, returned.continued), (2, 0));
    assert_eq!(pids(&returned.missing), [Some(2)]);
    // A returned process may exit before the wait.
    drop(streams);
    until_count(&agents, 0);
    assert_eq!(agents.await_return(&quiesced, Duration::ZERO).restored, 2);
    // A process that has not returned may exit too.
    fs::remove_file(proc.path().join("2/exe")).expect("removed");
    let returned = agents.await_return(&quiesced, LONG);
    assert_eq!((returned.restored, returned.missing), (2, Vec::new()));
    assert!(agents.quiesce(7, SHORT).is_ok());
}

#[test]
fn a_refusal_ends_the_attempt_when_all_have_answered_and_does_not_affect_the_next() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let tainted = [connect_agent(&path, 1, None), connect_agent(&path, 2, None)];
    let detaching = detaching_agent(&path, 3, 1);
    let shared = Arc::clone(&agents.shared);
    let refuses = thread::spawn(move || {
        refuse(&tainted[0], 1);
        // Each connection has its own thread: two refusals on their way are recorded in either order.
        until("the refusal", || {
            shared.lock().connections.values().any(|one| one.refusal.is_some()).then_some(())
        });
        refuse(&tainted[1], 1);
        tainted
    });
    let begun = Instant::now();
    let error = agents.quiesce(1, LONG).expect_err("refused");
    assert!(begun.elapsed() < LONG / 2, "waited although all agents had answered");
    let QuiesceError::Refused { process, reason, others } = &error else { panic!("{error:?}") };
    assert_eq!((process.pid, reason.as_str(), *others), (Some(1), "managed memory 1", 1));
    assert!(error.to_string().ends_with("(/bin/1): managed memory 1 (and 1 more processes)"), "{error}");
    detaching.join().expect("an agent");

    // The connections stay, the detached agent returns, and all can detach in the next attempt.
    let [first, second] = refuses.join().expect("an agent");
    let third = return_agent(&path, 3, 1, false);
    until_count(&agents, 3);
    let threads = [first, second, third].map(|stream| thread::spawn(move || detach(&stream, 2)));
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 3);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}

#[test]
fn a_refusal_is_reported_rather_than_the_deadline() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let slow = connect_agent(&path, 1, None);
    let tainted = connect_agent(&path, 2, None);
    let refuses = thread::spawn(move || {
        refuse(&tainted, 1);
        tainted
    });
    let error = agents.quiesce(1, ANSWER_TIMEOUT).expect_err("refused");
    assert!(matches!(&error, QuiesceError::Refused { others: 0, .. }), "{error:?}");
    drop(refuses.join().expect("an agent"));

    // The slow agent answers the previous attempt at last, and is asked again.
    let late = thread::spawn(move || {
        refuse(&slow, 1);
        detach(&slow, 2);
    });
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 1);
    late.join().expect("an agent");
}

#[test]
fn agents_have_a_little_less_time_than_the_launcher() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let stream = connect_agent(&path, 1, None);
    let asked = thread::spawn(move || expect_quiesce(&stream, 1));
    agents.quiesce(1, Duration::from_secs(800)).expect("the process has ended");
    let timeout = asked.join().expect("an agent");
    assert!(timeout <= Duration::from_secs(700) && timeout > Duration::from_secs(500), "{timeout:?}");
}

#[test]
fn no_agent_is_detached_before_all_have_returned() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let quiesced = detach_all(&agents, &path, 2);
    agents.resume_listening().expect("listening again");
    let first = return_agent(&path, 1, 1, false);
    until_count(&agents, 1);
    let returned = agents.await_return(&quiesced, SHORT);
    assert_eq!(pids(&returned.missing), [Some(2)]);

    let error = agents.quiesce(2, SHORT).expect_err("one has not returned");
    let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(pids(unanswered), [Some(2)]);
    assert!(path.exists(), "so that it can return");
    first.set_nonblocking(true).expect("set");
    assert!(receive(&first).is_err(), "the others were not asked");
    first.set_nonblocking(false).expect("set");

    let threads = [first, return_agent(&path, 2, 1, false)];
    let threads = threads.map(|stream| thread::spawn(move || detach(&stream, 3)));
    assert_eq!(agents.quiesce(3, LONG).expect("quiesced").processes().len(), 2);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}

#[test]
fn a_process_that_executes_another_program_has_ended() {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "read line; exec sleep 1000"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a process");
    let exe = format!("/proc/{}/exe", child.id());
    let is_shell = || fs::read_link(&exe).is_ok_and(|exe| !exe.ends_with("sleep"));
    until("the shell", || is_shell().then_some(()));
    let detached = detached_process(&child);
    assert!(!detached.handle.has_ended());
    drop(child.stdin.take());
    until("the exec", || detached.handle.has_ended().then_some(()));
    assert!(!is_shell());
    child.kill().expect("killed");
    child.wait().expect("reaped");
}

#[test]
fn a_loss_is_reported() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let quiesced = detach_all(&agents, &path, 1);
    agents.resume_listening().expect("listening again");
    let stream = connect_agent(&path, 1, Some(1));
    let lost = Some("GPU state is gone".to_owned());
    send(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 0, lost });
    let returned = agents.await_return(&quiesced, LONG);
    assert_eq!(returned.lost.len(), 1);
    assert!(returned.lost[0].to_string().ends_with("(/bin/1): GPU state is gone"), "{}", returned.lost[0]);
    assert_eq!(agents.losses.recv_timeout(LONG).expect("a loss"), returned.lost[0]);
    assert!(agents.losses.is_empty());
}

#[test]
fn a_connection_held_by_another_process_is_shut_down_after_the_agent_detached() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let stream = connect_agent(&path, 1, None);
    let mut copy = stream.try_clone().expect("a copy");
    let detaching = thread::spawn(move || detach(&stream, 1));
    assert_eq!(agents.quiesce(1, LONG).expect("quiesced").processes().len(), 1);
    detaching.join().expect("an agent");
    assert!(matches!(frame::read::<ToAgent>(&mut copy), Err(FrameError::Closed)));
}

#[test]
fn another_version_is_refused_and_an_unexpected_message_ends_the_connection() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let stream = UnixStream::connect(&path).expect("connected");
    let FromAgent::Hello(mut hello) = hello(1, None) else { unreachable!() };
    hello.version = PROTOCOL_VERSION + 1;
    send(&stream, &FromAgent::Hello(hello));
    assert!(matches!(receive(&stream), Ok(ToAgent::Refused { .. })));
    assert!(matches!(receive(&stream), Err(FrameError::Closed)));

    let stream = UnixStream::connect(&path).expect("connected");
    send(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
    assert!(receive(&stream).is_err());
    let stream = connect_agent(&path, 1, None);
    send(&stream, &FromAgent::Reconnected { attempt: 1, restored: true, copied_bytes: 0, lost: None });
    assert!(receive(&stream).is_err());
    until_count(&agents, 0);
}

#[test]
fn the_socket_is_private_and_replaces_only_sockets() {
    let (_directory, path) = socket_dir();
    fs::write(&path, "mine").expect("a file");
    assert_eq!(Agents::listen(&path, LONG).err().map(|error| error.kind()), Some(ErrorKind::AlreadyExists));
    assert_eq!(fs::read(&path).expect("still there"), b"mine");
    fs::remove_file(&path).expect("removed");

    drop(UnixListener::bind(&path).expect("a stale socket"));
    let agents = Agents::listen(&path, LONG).expect("listening");
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    drop(connect_agent(&path, 1, None));
    drop(agents);
    assert_eq!(fs::read_dir(path.parent().expect("a parent")).expect("a directory").count(), 0);
}

#[test]
fn a_process_is_displayed_with_its_ids_and_program() {
    let process = |pid, host_pid, exe: &str| Process { pid, host_pid, exe: exe.into() }.to_string();
    assert_eq!(process(Some(4), Some(4), "/bin/x"), "process 4 (/bin/x)");
    assert_eq!(process(Some(4), Some(9), ""), "process 4 of the job (9 outside)");
    assert_eq!(process(None, Some(9), ""), "process 9");
    assert_eq!(process(Some(4), None, ""), "process 4");
}

/// Sends one message about shared memory on a separate connection, which ends after the answer.
fn ask_broker(path: &Path, message: &FromAgent) -> ToAgent {
    let stream = UnixStream::connect(path).expect("connected");
    send(&stream, message);
    if matches!(message, FromAgent::Publish { .. }) {
        let memory = tempfile::tempfile().expect("a file");
        ckpt_protocol::descriptors::send(stream.as_fd(), &[memory.as_fd()]).expect("sent");
    }
    let answer = receive(&stream).expect("an answer");
    if matches!(answer, ToAgent::Shared { .. }) {
        assert_eq!(ckpt_protocol::descriptors::receive(stream.as_fd(), 1).expect("memory").len(), 1);
    }
    assert!(receive(&stream).is_err());
    answer
}

#[test]
fn an_agent_of_another_version_that_waits_for_its_state_is_a_loss() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let stream = UnixStream::connect(&path).expect("connected");
    let exe = "/bin/7".to_owned();
    let version = PROTOCOL_VERSION + 1;
    let hello = Hello {
        version,
        pid: 7,
        start_time_ticks: 1,
        exe,
        away: Some(4),
        is_detached: true,
        supports_activity: true,
        supports_release: true,
        supports_cut: false,
        supports_reads: false,
        supports_loads: false,
        parks_by_key: false,
        instance: 0,
    };
    send(&stream, &FromAgent::Hello(hello));
    assert!(matches!(receive(&stream).expect("an answer"), ToAgent::Refused { .. }));
    let loss = agents.losses.recv_timeout(LONG).expect("a loss");
    assert_eq!(loss.process.pid, Some(7));
    assert!(loss.reason.contains("the ckpt-run that took the snapshot"), "{loss}");
}

#[test]
fn memory_is_shared_over_separate_connections_and_an_agents_connection() {
    let (_directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    let key = ckpt_protocol::agent::ShareKey(7);
    let fetch = FromAgent::Fetch { pid: 2, key, owner: 1, instance: 0 };
    assert_eq!(ask_broker(&path, &fetch), ToAgent::NotShared { is_final: false });
    let stream = connect_agent(&path, 1, None);
    until_count(&agents, 1);
    assert_eq!(ask_broker(&path, &fetch), ToAgent::NotShared { is_final: true });
    let publish =
        FromAgent::Publish { pid: 1, key, bytes: 9, has_root: false, is_multicast: false, instance: 0 };
    assert_eq!(ask_broker(&path, &publish), ToAgent::Published { is_kept: true });
    assert_eq!(ask_broker(&path, &fetch), ToAgent::Shared { bytes: 9 });
    assert_eq!(agents.count(), 1);

    // Memory that its owner has freed while process 2 has it open is in no process's image.
    send(&stream, &FromAgent::Withdraw { pid: 1, keys: vec![key] });
    assert_eq!(receive(&stream).expect("an answer"), ToAgent::Withdrawn);
    let error = agents.quiesce(1, LONG).expect_err("refused before any agent was asked");
    let QuiesceError::Refused { process, reason, others: 0 } = &error else { panic!("{error:?}") };
    assert_eq!(process.pid, Some(2));
    assert!(reason.contains("cuIpcOpenMemHandle"), "{reason}");

    // The owner frees the memory while it detaches.
    assert_eq!(ask_broker(&path, &publish), ToAgent::Published { is_kept: true });
    let importer = connect_agent(&path, 2, None);
    let owner = thread::spawn(move || {
        expect_quiesce(&stream, 1);
        send(&stream, &FromAgent::Withdraw { pid: 1, keys: vec![key] });
        assert_eq!(receive(&stream).expect("an answer"), ToAgent::Withdrawn);
        send(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
    });
    let threads = [owner, thread::spawn(move || detach(&importer, 1))];
    let error = agents.quiesce(1, LONG).expect_err("refused");
    assert!(matches!(&error, QuiesceError::Refused { process, .. } if process.pid == Some(2)), "{error:?}");
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));

    // Both return.
    let [first, second] = [1, 2].map(|pid| connect_agent(&path, pid, Some(1)));
    send(&second, &FromAgent::Withdraw { pid: 2, keys: vec![key] });
    assert_eq!(receive(&second).expect("an answer"), ToAgent::Withdrawn);
    let streams = [first, second].map(|stream| {
        send(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 0, lost: None });
        stream
    });
    until_count(&agents, 2);
    let threads = streams.map(|stream| thread::spawn(move || detach(&stream, 2)));
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 2);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}
