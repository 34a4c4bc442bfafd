//! Agents that are played by the tests.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, ToAgent};
use ckpt_protocol::frame::{self, FrameError};
use rustix::process::Pid;

use super::process::{Away, Life, pidfd};
use super::*;

/// Long enough for anything that is to happen.
pub(super) const LONG: Duration = Duration::from_secs(300);
/// Short enough to wait for what is not to happen.
pub(super) const SHORT: Duration = Duration::from_millis(60);
/// Long enough for an agent that answers, and short enough to wait out for another one that does not.
const ANSWERED: Duration = Duration::from_secs(3);

pub(super) fn place() -> (tempfile::TempDir, PathBuf) {
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
    })
}

pub(super) fn tell(mut stream: &UnixStream, message: &FromAgent) {
    frame::write(&mut stream, message).expect("told");
}

pub(super) fn told(mut stream: &UnixStream) -> Result<ToAgent, FrameError> {
    frame::read(&mut stream)
}

/// A connection, once the launcher listens, on which nothing is waited for in vain.
pub(super) fn connected(path: &Path) -> UnixStream {
    let stream = until("the launcher", || UnixStream::connect(path).ok());
    stream.set_read_timeout(Some(LONG)).expect("set");
    stream
}

/// An agent that has just connected and been welcomed, once the launcher listens.
pub(super) fn agent(path: &Path, pid: u32, away: Option<u64>) -> UnixStream {
    let stream = connected(path);
    tell(&stream, &hello(pid, away));
    assert_eq!(told(&stream).expect("an answer"), ToAgent::Welcome { version: PROTOCOL_VERSION });
    stream
}

pub(super) fn back(path: &Path, pid: u32, attempt: u64, restored: bool) -> UnixStream {
    let stream = agent(path, pid, Some(attempt));
    tell(&stream, &FromAgent::Reconnected { attempt, restored, copied_bytes: 0, lost: None });
    stream
}

/// Hears a request; returns how long the agent has for it.
pub(super) fn is_asked(stream: &UnixStream, wanted: u64) -> Duration {
    let ToAgent::Quiesce { attempt, timeout_ms, .. } = told(stream).expect("a request") else {
        panic!("not a request");
    };
    assert_eq!(attempt, wanted);
    Duration::from_millis(timeout_ms)
}

fn go_away(stream: &UnixStream, attempt: u64) {
    is_asked(stream, attempt);
    tell(stream, &FromAgent::Quiesced { attempt, gpu: None });
}

fn refuse(stream: &UnixStream, attempt: u64) {
    is_asked(stream, attempt);
    tell(stream, &FromAgent::Failed { attempt, reason: format!("managed memory {attempt}"), is_lost: false });
}

/// An agent that goes away when it is asked to, and only that.
fn obedient(path: &Path, pid: u32, attempt: u64) -> JoinHandle<()> {
    let stream = agent(path, pid, None);
    thread::spawn(move || go_away(&stream, attempt))
}

fn pids(processes: &[Process]) -> Vec<Option<u32>> {
    let mut pids: Vec<_> = processes.iter().map(|process| process.pid).collect();
    pids.sort();
    pids
}

/// Sends agents 1 to `count` away for attempt 1.
fn all_away(agents: &Agents, path: &Path, count: u32) -> Quiesced {
    let threads: Vec<_> = (1..=count).map(|pid| obedient(path, pid, 1)).collect();
    let quiesced = agents.quiesce(1, LONG).expect("quiesced");
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    quiesced
}

#[test]
fn all_go_away_and_come_back() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let quiesced = all_away(&agents, &path, 3);
    assert_eq!(quiesced.attempt(), 1);
    let gone: Vec<_> = quiesced.processes().cloned().collect();
    assert_eq!(pids(&gone), [Some(1), Some(2), Some(3)]);
    assert_eq!(gone[0].host_pid, Some(std::process::id()));
    assert_eq!(agents.count(), 0);
    assert!(!path.exists());

    agents.resume_listening().expect("listening again");
    let streams = [back(&path, 1, 1, false), back(&path, 2, 1, true), back(&path, 3, 1, false)];
    let returned = agents.await_back(&quiesced, LONG);
    assert_eq!(returned, Back { continued: 2, restored: 1, ..Back::default() });
    assert_eq!(agents.count(), 3);

    // And again.
    let threads = streams.map(|stream| thread::spawn(move || go_away(&stream, 2)));
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 3);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}

#[test]
fn nobody_there_is_no_obstacle() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let quiesced = agents.quiesce(1, Duration::ZERO).expect("quiesced");
    assert!(matches!(agents.quiesce(2, LONG), Err(QuiesceError::NotListening)));
    agents.resume_listening().expect("listening again");
    agents.resume_listening().expect("still listening");
    assert_eq!(agents.await_back(&quiesced, Duration::ZERO), Back::default());
}

#[test]
fn whoever_does_not_answer_is_named_and_all_stay_in_touch() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let deaf = agent(&path, 7, None);
    let obedient = obedient(&path, 8, 1);
    let error = agents.quiesce(1, ANSWERED).expect_err("one does not answer");
    let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(pids(unanswered), [Some(7)]);
    let text = error.to_string();
    assert!(text.contains("process 7 of the job") && text.contains("/bin/7"), "{text}");
    obedient.join().expect("an agent");
    assert_eq!(agents.count(), 1);

    // The first one wakes up at last, for an attempt that has been given up; the other one is back.
    let other = back(&path, 8, 1, false);
    until_count(&agents, 2);
    let late = thread::spawn(move || go_away(&deaf, 1));
    late.join().expect("an agent");
    until_count(&agents, 1);
    let deaf = back(&path, 7, 1, false);
    until_count(&agents, 2);
    let deaf = thread::spawn(move || go_away(&deaf, 2));
    let other = thread::spawn(move || go_away(&other, 2));
    let quiesced = agents.quiesce(2, LONG).expect("quiesced");
    [deaf, other].into_iter().for_each(|thread| thread.join().expect("an agent"));
    let gone: Vec<_> = quiesced.processes().cloned().collect();
    assert_eq!(pids(&gone), [Some(7), Some(8)]);
}

#[test]
fn a_connection_without_a_hello_is_waited_for() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let shy = UnixStream::connect(&path).expect("connected");
    let error = agents.quiesce(1, SHORT).expect_err("nobody knows who that is");
    let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(pids(unanswered), [None]);
    assert_eq!(unanswered[0].host_pid, Some(std::process::id()));

    let shy = thread::spawn(move || {
        thread::sleep(SHORT);
        tell(&shy, &hello(5, None));
        assert!(matches!(told(&shy), Ok(ToAgent::Welcome { .. })));
        go_away(&shy, 2);
    });
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 1);
    shy.join().expect("an agent");
}

#[test]
fn connections_that_race_with_the_end_of_listening_are_known_or_never_come_to_be() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    for attempt in 0..30 {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::SeqCst) {
                        let Ok(stream) = UnixStream::connect(&path) else { continue };
                        tell(&stream, &hello(1, None));
                        assert!(matches!(told(&stream), Ok(ToAgent::Welcome { .. })));
                        go_away(&stream, attempt);
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
fn whoever_exits_is_not_waited_for() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let exits = agent(&path, 1, None);
    let exits = thread::spawn(move || {
        is_asked(&exits, 1);
    });
    assert_eq!(agents.quiesce(1, LONG).expect("quiesced").processes().len(), 0);
    exits.join().expect("an agent");
}

/// A process that does nothing, in the place of one of the job.
fn other_process() -> Child {
    Command::new("sleep").arg("1000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a process")
}

fn away(child: &Child) -> Away {
    let host_pid = Some(child.id());
    let life = Pid::from_raw(i32::try_from(child.id()).expect("fits")).and_then(pidfd);
    let life = Life::of(life, format!("/proc/{}", child.id()).into());
    let process = Process { pid: Some(9), host_pid, exe: String::new() };
    Away { process, life: Arc::new(life), report: None }
}

#[test]
fn whoever_exits_while_away_is_not_waited_for() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let mut child = other_process();
    let quiesced = Quiesced { attempt: 1, away: vec![away(&child)], gpu: Vec::new() };
    let returned = agents.await_back(&quiesced, SHORT);
    assert_eq!(pids(&returned.missing), [Some(9)]);
    child.kill().expect("killed");
    assert_eq!(agents.await_back(&quiesced, LONG), Back::default());
    child.wait().expect("reaped");
}

#[test]
fn another_program_in_the_same_process_is_not_the_agent_that_went_away() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let quiesced = all_away(&agents, &path, 1);
    agents.resume_listening().expect("listening again");
    let _new_program = agent(&path, 1, None);
    assert_eq!(agents.await_back(&quiesced, LONG), Back::default());
}

#[test]
fn a_restoring_launcher_knows_whom_to_expect() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let proc = tempfile::tempdir().expect("a directory");
    for pid in ["1", "2", "3"] {
        fs::create_dir(proc.path().join(pid)).expect("a directory");
        fs::write(proc.path().join(pid).join("exe"), pid).expect("a program");
    }
    let quiesced = Quiesced::expected(6, [1, 2, 3, 4], proc.path());
    assert_eq!(quiesced.processes().len(), 3, "one has exited already");
    let streams = [back(&path, 3, 6, true), back(&path, 1, 6, true)];
    until_count(&agents, 2);
    let returned = agents.await_back(&quiesced, SHORT);
    assert_eq!((returned.restored, returned.continued), (2, 0));
    assert_eq!(pids(&returned.missing), [Some(2)]);
    // What is back may exit before it is asked for.
    drop(streams);
    until_count(&agents, 0);
    assert_eq!(agents.await_back(&quiesced, Duration::ZERO).restored, 2);
    // And what is not back may do so too.
    fs::remove_file(proc.path().join("2/exe")).expect("removed");
    let returned = agents.await_back(&quiesced, LONG);
    assert_eq!((returned.restored, returned.missing), (2, Vec::new()));
    assert!(agents.quiesce(7, SHORT).is_ok());
}

#[test]
fn a_refusal_ends_the_attempt_when_all_have_answered_and_is_forgotten_then() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let tainted = [agent(&path, 1, None), agent(&path, 2, None)];
    let obedient = obedient(&path, 3, 1);
    let refuses = thread::spawn(move || {
        tainted.iter().for_each(|stream| refuse(stream, 1));
        tainted
    });
    let begun = Instant::now();
    let error = agents.quiesce(1, LONG).expect_err("refused");
    assert!(begun.elapsed() < LONG / 2, "nobody else was to be waited for");
    let QuiesceError::Refused { process, reason, others } = &error else { panic!("{error:?}") };
    assert_eq!((process.pid, reason.as_str(), *others), (Some(1), "managed memory 1", 1));
    assert!(error.to_string().ends_with("(/bin/1): managed memory 1 (and 1 more processes)"), "{error}");
    obedient.join().expect("an agent");

    // The connections are the same, who went away is back, and all may go the next time.
    let [first, second] = refuses.join().expect("an agent");
    let third = back(&path, 3, 1, false);
    until_count(&agents, 3);
    let threads = [first, second, third].map(|stream| thread::spawn(move || go_away(&stream, 2)));
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 3);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}

#[test]
fn a_refusal_is_told_rather_than_the_deadline() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let deaf = agent(&path, 1, None);
    let tainted = agent(&path, 2, None);
    let refuses = thread::spawn(move || {
        refuse(&tainted, 1);
        tainted
    });
    let error = agents.quiesce(1, ANSWERED).expect_err("refused");
    assert!(matches!(&error, QuiesceError::Refused { others: 0, .. }), "{error:?}");
    drop(refuses.join().expect("an agent"));

    // It answers at last, to the attempt before, and is asked again.
    let late = thread::spawn(move || {
        refuse(&deaf, 1);
        go_away(&deaf, 2);
    });
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 1);
    late.join().expect("an agent");
}

#[test]
fn agents_have_a_little_less_time_than_the_launcher() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let stream = agent(&path, 1, None);
    let asked = thread::spawn(move || is_asked(&stream, 1));
    agents.quiesce(1, Duration::from_secs(8)).expect("gone");
    let timeout = asked.join().expect("an agent");
    assert!(timeout <= Duration::from_secs(7) && timeout > Duration::from_secs(5), "{timeout:?}");
}

#[test]
fn nobody_is_sent_away_before_all_are_back() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let quiesced = all_away(&agents, &path, 2);
    agents.resume_listening().expect("listening again");
    let first = back(&path, 1, 1, false);
    until_count(&agents, 1);
    let returned = agents.await_back(&quiesced, SHORT);
    assert_eq!(pids(&returned.missing), [Some(2)]);

    let error = agents.quiesce(2, SHORT).expect_err("one is not back");
    let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(pids(unanswered), [Some(2)]);
    assert!(path.exists(), "so that it can come back");
    first.set_nonblocking(true).expect("set");
    assert!(told(&first).is_err(), "the others were not asked");
    first.set_nonblocking(false).expect("set");

    let threads = [first, back(&path, 2, 1, false)];
    let threads = threads.map(|stream| thread::spawn(move || go_away(&stream, 3)));
    assert_eq!(agents.quiesce(3, LONG).expect("quiesced").processes().len(), 2);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}

#[test]
fn another_program_is_not_waited_for() {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "read line; exec sleep 1000"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a process");
    let exe = format!("/proc/{}/exe", child.id());
    let is_shell = || fs::read_link(&exe).is_ok_and(|exe| !exe.ends_with("sleep"));
    until("the shell", || is_shell().then_some(()));
    let away = away(&child);
    assert!(!away.life.is_over());
    drop(child.stdin.take());
    until("the exec", || away.life.is_over().then_some(()));
    assert!(!is_shell());
    child.kill().expect("killed");
    child.wait().expect("reaped");
}

#[test]
fn a_loss_is_told_whenever_it_comes() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let quiesced = all_away(&agents, &path, 1);
    agents.resume_listening().expect("listening again");
    let stream = agent(&path, 1, Some(1));
    let lost = Some("GPU state is gone".to_owned());
    tell(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 0, lost });
    let returned = agents.await_back(&quiesced, LONG);
    assert_eq!(returned.lost.len(), 1);
    assert!(returned.lost[0].to_string().ends_with("(/bin/1): GPU state is gone"), "{}", returned.lost[0]);
    assert_eq!(agents.losses().recv_timeout(LONG).expect("told"), returned.lost[0]);
    assert!(agents.losses().is_empty());
}

#[test]
fn a_held_connection_is_cut_off_after_the_farewell() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let stream = agent(&path, 1, None);
    let mut copy = stream.try_clone().expect("a copy");
    let leaves = thread::spawn(move || go_away(&stream, 1));
    assert_eq!(agents.quiesce(1, LONG).expect("quiesced").processes().len(), 1);
    leaves.join().expect("an agent");
    assert!(matches!(frame::read::<ToAgent>(&mut copy), Err(FrameError::Closed)));
}

#[test]
fn another_version_is_refused_and_nonsense_ends_the_connection() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let stream = UnixStream::connect(&path).expect("connected");
    let FromAgent::Hello(mut hello) = hello(1, None) else { unreachable!() };
    hello.version = PROTOCOL_VERSION + 1;
    tell(&stream, &FromAgent::Hello(hello));
    assert!(matches!(told(&stream), Ok(ToAgent::Refused { .. })));
    assert!(matches!(told(&stream), Err(FrameError::Closed)));

    let stream = UnixStream::connect(&path).expect("connected");
    tell(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
    assert!(told(&stream).is_err());
    let stream = agent(&path, 1, None);
    tell(&stream, &FromAgent::Reconnected { attempt: 1, restored: true, copied_bytes: 0, lost: None });
    assert!(told(&stream).is_err());
    until_count(&agents, 0);
}

#[test]
fn the_socket_is_private_and_replaces_only_sockets() {
    let (_directory, path) = place();
    fs::write(&path, "mine").expect("a file");
    assert_eq!(Agents::listen(&path).err().map(|error| error.kind()), Some(ErrorKind::AlreadyExists));
    assert_eq!(fs::read(&path).expect("still there"), b"mine");
    fs::remove_file(&path).expect("removed");

    drop(UnixListener::bind(&path).expect("a stale socket"));
    let agents = Agents::listen(&path).expect("listening");
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    drop(agent(&path, 1, None));
    drop(agents);
    assert_eq!(fs::read_dir(path.parent().expect("a parent")).expect("a directory").count(), 0);
}

#[test]
fn processes_are_told_apart_in_words() {
    let process = |pid, host_pid, exe: &str| Process { pid, host_pid, exe: exe.into() }.to_string();
    assert_eq!(process(Some(4), Some(4), "/bin/x"), "process 4 (/bin/x)");
    assert_eq!(process(Some(4), Some(9), ""), "process 4 of the job (9 outside)");
    assert_eq!(process(None, Some(9), ""), "process 9");
    assert_eq!(process(Some(4), None, ""), "process 4");
}

/// Says one thing about shared memory on a connection of its own; only its end follows the answer.
fn about_memory(path: &Path, message: &FromAgent) -> ToAgent {
    let stream = UnixStream::connect(path).expect("connected");
    tell(&stream, message);
    if matches!(message, FromAgent::Publish { .. }) {
        let memory = tempfile::tempfile().expect("a file");
        ckpt_protocol::descriptors::send(stream.as_fd(), &[memory.as_fd()]).expect("sent");
    }
    let answer = told(&stream).expect("an answer");
    if matches!(answer, ToAgent::Shared { .. }) {
        assert_eq!(ckpt_protocol::descriptors::receive(stream.as_fd(), 1).expect("memory").len(), 1);
    }
    assert!(told(&stream).is_err());
    answer
}

#[test]
fn an_agent_of_another_version_that_waits_for_its_state_is_a_loss() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
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
    };
    tell(&stream, &FromAgent::Hello(hello));
    assert!(matches!(told(&stream).expect("an answer"), ToAgent::Refused { .. }));
    let loss = agents.losses().recv_timeout(LONG).expect("a loss");
    assert_eq!(loss.process.pid, Some(7));
    assert!(loss.reason.contains("the ckpt-run that took the snapshot"), "{loss}");
}

#[test]
fn memory_is_shared_over_connections_of_its_own_and_an_agents_own() {
    let (_directory, path) = place();
    let agents = Agents::listen(&path).expect("listening");
    let key = ckpt_protocol::agent::ShareKey(7);
    let fetch = FromAgent::Fetch { pid: 2, key, owner: 1 };
    assert_eq!(about_memory(&path, &fetch), ToAgent::NotShared { is_final: false });
    let stream = agent(&path, 1, None);
    until_count(&agents, 1);
    assert_eq!(about_memory(&path, &fetch), ToAgent::NotShared { is_final: true });
    let publish = FromAgent::Publish { pid: 1, key, bytes: 9 };
    assert_eq!(about_memory(&path, &publish), ToAgent::Published { is_kept: true });
    assert_eq!(about_memory(&path, &fetch), ToAgent::Shared { bytes: 9 });
    assert_eq!(agents.count(), 1);

    // Memory that the owner has freed and process 2 has still open is in nobody's image.
    tell(&stream, &FromAgent::Withdraw { pid: 1, keys: vec![key] });
    assert_eq!(told(&stream).expect("an answer"), ToAgent::Withdrawn);
    let error = agents.quiesce(1, LONG).expect_err("refused, and nobody was asked");
    let QuiesceError::Refused { process, reason, others: 0 } = &error else { panic!("{error:?}") };
    assert_eq!(process.pid, Some(2));
    assert!(reason.contains("cuIpcOpenMemHandle"), "{reason}");

    // Freed at the last moment.
    assert_eq!(about_memory(&path, &publish), ToAgent::Published { is_kept: true });
    let importer = agent(&path, 2, None);
    let owner = thread::spawn(move || {
        is_asked(&stream, 1);
        tell(&stream, &FromAgent::Withdraw { pid: 1, keys: vec![key] });
        assert_eq!(told(&stream).expect("an answer"), ToAgent::Withdrawn);
        tell(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
    });
    let threads = [owner, thread::spawn(move || go_away(&importer, 1))];
    let error = agents.quiesce(1, LONG).expect_err("refused");
    assert!(matches!(&error, QuiesceError::Refused { process, .. } if process.pid == Some(2)), "{error:?}");
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));

    // On their way back.
    let [first, second] = [1, 2].map(|pid| agent(&path, pid, Some(1)));
    tell(&second, &FromAgent::Withdraw { pid: 2, keys: vec![key] });
    assert_eq!(told(&second).expect("an answer"), ToAgent::Withdrawn);
    let streams = [first, second].map(|stream| {
        tell(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 0, lost: None });
        stream
    });
    until_count(&agents, 2);
    let threads = streams.map(|stream| thread::spawn(move || go_away(&stream, 2)));
    assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 2);
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
}
