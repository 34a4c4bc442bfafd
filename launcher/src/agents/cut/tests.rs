//! Tests that play the part of ranks.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use ckpt_cut::{Member, MemberReport, Name, Role};
use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION};
use ckpt_protocol::frame::FrameError;

use super::super::process::Quiesced;
use super::super::tests::{
    LONG, SHORT, connect, connect_agent, expect_quiesce, hello, receive, send, socket_dir, until, until_count,
};
use super::*;

const NEVER: &(dyn Fn() -> bool + Sync) = &|| false;
/// Long enough for an agent that answers.
const ATTEMPT: Duration = Duration::from_secs(3);

fn listen(settings: Option<Settings>) -> (tempfile::TempDir, PathBuf, Agents) {
    let (directory, path) = socket_dir();
    let agents = Agents::listen(&path, LONG).expect("listening");
    if let Some(settings) = settings {
        agents.shared.lock().cut = Cut::new(settings);
    }
    (directory, path, agents)
}

fn connect_rank(path: &Path, pid: u32, away: Option<u64>) -> UnixStream {
    let stream = connect(path);
    say_hello(&stream, pid, away);
    stream
}

fn say_hello(stream: &UnixStream, pid: u32, away: Option<u64>) {
    let FromAgent::Hello(plain) = hello(pid, away) else { unreachable!("a hello") };
    send(stream, &FromAgent::Hello(Hello { supports_cut: true, ..plain }));
    assert_eq!(receive(stream).expect("an answer"), ToAgent::Welcome { version: PROTOCOL_VERSION });
}

fn return_rank(path: &Path, pid: u32) -> UnixStream {
    let stream = connect_rank(path, pid, Some(1));
    send(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 0, lost: None });
    stream
}

/// Ranks 1 to `COUNT`, registered.
fn ranks<const COUNT: usize>(agents: &Agents, path: &Path) -> [UnixStream; COUNT] {
    let ranks = std::array::from_fn(|index| connect_rank(path, index as u32 + 1, None));
    until_count(agents, COUNT);
    ranks
}

fn expect_order(stream: &UnixStream) -> Order {
    match receive(stream).expect("an order") {
        ToAgent::Cut { order } => order,
        other => panic!("not an order: {other:?}"),
    }
}

fn expect_count(stream: &UnixStream, attempt: u64) {
    assert_eq!(expect_order(stream), Order::Count { attempt });
}

fn expect_release(stream: &UnixStream) {
    assert_eq!(expect_order(stream), Order::Release);
}

/// Receives targets: their version, and the number of steps to reach.
fn expect_reach(stream: &UnixStream) -> (u64, u64) {
    let Order::Reach { version, targets, .. } = expect_order(stream) else { panic!("no targets") };
    (version, targets[0].1)
}

fn expect_nothing(stream: &UnixStream) {
    stream.set_read_timeout(Some(SHORT)).expect("set");
    let received = receive(stream);
    assert!(received.as_ref().is_err_and(FrameError::is_timeout), "{received:?}");
    stream.set_read_timeout(Some(LONG)).expect("set");
}

/// A report of a rank that has begun so many steps on the communicator of all.
fn report(attempt: u64, version: u64, rank: u32, sequence: u64) -> Report {
    let member = Member { communicator: Name(1 << 96), index: rank };
    let role = Role::Communicator { awaits: None, alias: None };
    let members = vec![MemberReport { member, role, sequence, call: "ncclAllReduce".to_owned() }];
    Report { attempt, version, in_call: 0, members, parked: Vec::new() }
}

fn tell(stream: &UnixStream, report: Report) {
    send(stream, &FromAgent::Steps { report });
}

fn without_communicators(attempt: u64) -> Report {
    Report { attempt, version: 0, in_call: 0, members: Vec::new(), parked: Vec::new() }
}

/// Brings ranks to a cut at which they are parked.
fn cut_of<'a>(agents: &'a Agents, ranks: &[&UnixStream]) -> HeldCut<'a> {
    thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        for (rank, stream) in ranks.iter().enumerate() {
            expect_count(stream, 1);
            tell(stream, report(1, 0, rank as u32, 5));
        }
        for (rank, stream) in ranks.iter().enumerate() {
            assert_eq!(expect_reach(stream), (1, 5));
            tell(stream, report(1, 1, rank as u32, 5));
        }
        reaching.join().expect("no panic").expect("a cut")
    })
}

#[test]
fn a_rank_that_is_behind_is_told_how_far_to_go() {
    let (_directory, path, agents) = listen(None);
    let [first, second, behind] = &ranks(&agents, &path);
    let held = thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        for (rank, stream, sequence) in [(0, first, 5), (1, second, 5), (2, behind, 4)] {
            expect_count(stream, 1);
            tell(stream, report(1, 0, rank, sequence));
        }
        for (rank, stream) in [(0, first), (1, second)] {
            assert_eq!(expect_reach(stream), (1, 5));
            tell(stream, report(1, 1, rank, 5));
        }
        assert_eq!(expect_reach(behind), (1, 5));
        tell(behind, report(1, 1, 2, 4));
        tell(behind, Report { in_call: 1, ..report(1, 1, 2, 5) });
        thread::sleep(SHORT);
        assert!(!reaching.is_finished(), "it is in a call");
        tell(behind, report(1, 1, 2, 5));
        reaching.join().expect("no panic").expect("a cut")
    });
    assert_eq!(held.cost.map(|cost| cost.attempts), Some(1));
    assert!(!path.exists(), "nobody can connect until the agents are detached");
    expect_nothing(first);
    drop(held);
    [first, second, behind].into_iter().for_each(expect_release);
    assert!(path.exists());
}

/// Plays a rank until it is released so many times.
fn play(stream: &UnixStream, rank: u32, sequence: u64, parked: &[&str], releases: usize) {
    let mut released = 0;
    while released < releases {
        let (attempt, version) = match expect_order(stream) {
            Order::Count { attempt } => (attempt, 0),
            Order::Reach { attempt, version, .. } => (attempt, version),
            Order::Release => {
                released += 1;
                continue;
            }
        };
        let parked = parked.iter().map(|&call| call.to_owned()).collect();
        tell(stream, Report { parked, ..report(attempt, version, rank, sequence) });
    }
    expect_nothing(stream);
}

#[test]
fn a_failure_names_processes_and_calls_and_releases_all() {
    let settings = Settings { timeout: ATTEMPT, attempts: 2, back_off: SHORT };
    let (_directory, path, agents) = listen(Some(settings));
    let [parked, behind] = &ranks(&agents, &path);
    thread::scope(|scope| {
        scope.spawn(|| play(parked, 0, 5, &["ncclBroadcast"], 2));
        scope.spawn(|| play(behind, 1, 4, &[], 2));
        let error = agents.reach_cut(LONG, None, NEVER).err().expect("no cut");
        let QuiesceError::NoCut { reason, after } = &error else { panic!("{error:?}") };
        assert!(*after >= ATTEMPT * 2 + SHORT && error.to_string().contains("(given up after "), "{error}");
        let outside = std::process::id();
        assert_eq!(
            *reason,
            format!(
                "the ranks did not reach a common step in 2 attempts: process 2 of the job ({outside} outside) (/bin/2) \
                 has begun 4 of 5 steps as rank 1 of communicator 00000001 and waits after ncclAllReduce; process 1 of \
                 the job ({outside} outside) (/bin/1) is parked before ncclBroadcast"
            )
        );
    });
    assert!(path.exists());
}

#[test]
fn a_cut_that_takes_longer_than_the_checkpoint_has_is_given_up() {
    let (_directory, path, agents) = listen(None);
    let [silent] = &ranks(&agents, &path);
    let error = agents.reach_cut(SHORT, None, NEVER).err().expect("no cut");
    let QuiesceError::NoCut { reason, .. } = &error else { panic!("{error:?}") };
    assert!(reason.contains("in 1 attempt: process 1") && reason.ends_with("has not answered"), "{reason}");
    expect_count(silent, 1);
    expect_release(silent);
    expect_nothing(silent);
}

#[test]
fn a_checkpoint_that_is_not_wanted_any_more_releases_all() {
    let (_directory, path, agents) = listen(None);
    let [rank] = &ranks(&agents, &path);
    let error = agents.reach_cut(LONG, None, &|| true).err().expect("withdrawn");
    assert!(matches!(error, QuiesceError::Withdrawn), "{error:?}");
    expect_count(rank, 1);
    expect_release(rank);
    expect_nothing(rank);
}

#[test]
fn an_agent_that_connects_during_the_cut_takes_part() {
    let (_directory, path, agents) = listen(None);
    let [first] = &ranks(&agents, &path);
    thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        expect_count(first, 1);
        let new = connect_rank(&path, 2, None);
        expect_count(&new, 1);
        // A connection without a hello: only it keeps this from being the cut.
        let shy = connect(&path);
        tell(first, without_communicators(1));
        tell(&new, without_communicators(1));
        until("the end of listening", || (!path.exists()).then_some(()));
        thread::sleep(SHORT);
        assert!(!reaching.is_finished(), "a process is unknown");
        say_hello(&shy, 3, None);
        expect_count(&shy, 1);
        until("listening", || path.exists().then_some(()));
        tell(&shy, without_communicators(1));
        let held = reaching.join().expect("no panic").expect("a cut");
        assert_eq!(held.cost, None, "no process has a communicator");
        drop(held);
        [first, &new, &shy].into_iter().for_each(expect_release);
    });
}

#[test]
fn the_others_are_cut_without_a_process_that_ends() {
    let (_directory, path, agents) = listen(None);
    let [mut ending, other] = ranks(&agents, &path).map(Some);
    thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        let (ahead, behind) = (other.as_ref().expect("there"), ending.as_ref().expect("there"));
        for (rank, stream, sequence) in [(0, ahead, 5), (1, behind, 4)] {
            expect_count(stream, 1);
            tell(stream, report(1, 0, rank, sequence));
        }
        assert_eq!(expect_reach(ahead), (1, 5));
        tell(ahead, report(1, 1, 0, 5));
        drop(ending.take());
        let held = reaching.join().expect("no panic").expect("a cut");
        drop(held);
        expect_release(ahead);
    });
}

#[test]
fn a_job_that_ends_during_the_cut_does_not_keep_it() {
    let (_directory, path, agents) = listen(None);
    let ranks: [_; 2] = ranks(&agents, &path);
    thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        ranks.iter().for_each(|rank| expect_count(rank, 1));
        drop(ranks);
        drop(reaching.join().expect("no panic").expect("nobody is left"));
    });
}

fn detach(stream: &UnixStream) {
    expect_quiesce(stream, 1);
    send(stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
}

/// Detaches ranks that are at a cut.
fn detach_all(agents: &Agents, ranks: Vec<UnixStream>) -> Quiesced {
    let threads: Vec<_> = ranks.into_iter().map(|rank| thread::spawn(move || detach(&rank))).collect();
    let quiesced = agents.quiesce(1, LONG).expect("quiesced");
    threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    quiesced
}

#[test]
fn ranks_are_released_when_all_are_back() {
    let (_directory, path, agents) = listen(None);
    let ranks: [_; 2] = ranks(&agents, &path);
    let held = cut_of(&agents, &ranks.each_ref());
    let quiesced = detach_all(&agents, ranks.into());
    agents.resume_listening().expect("listening again");
    let first = return_rank(&path, 1);
    until_count(&agents, 1);
    assert_eq!(agents.await_return(&quiesced, SHORT).missing.len(), 1);
    drop(held);
    expect_nothing(&first);
    let late = return_rank(&path, 2);
    [&first, &late].into_iter().for_each(expect_release);
    [&first, &late].into_iter().for_each(expect_nothing);
}

#[test]
fn ranks_are_released_after_a_refused_quiesce() {
    let (_directory, path, agents) = listen(None);
    let [detaching, refusing] = ranks(&agents, &path);
    let held = cut_of(&agents, &[&detaching, &refusing]);
    let refused = thread::spawn(move || {
        expect_quiesce(&refusing, 1);
        send(&refusing, &FromAgent::Failed { attempt: 1, reason: "managed memory".into(), is_lost: false });
        refusing
    });
    let detached = thread::spawn(move || detach(&detaching));
    assert!(matches!(agents.quiesce(1, LONG), Err(QuiesceError::Refused { .. })));
    drop(held);
    detached.join().expect("an agent");
    let refusing = refused.join().expect("an agent");
    expect_nothing(&refusing);
    let back = return_rank(&path, 1);
    [&back, &refusing].into_iter().for_each(expect_release);

    // And the next cut begins with nobody parked.
    cut_again(&agents, &[&back, &refusing]);
}

fn cut_again(agents: &Agents, ranks: &[&UnixStream]) {
    thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        for rank in ranks {
            expect_count(rank, 2);
            tell(rank, without_communicators(2));
        }
        drop(reaching.join().expect("no panic").expect("a cut"));
    });
    ranks.iter().for_each(|rank| expect_release(rank));
}

/// A process that has detached and exits is not waited for.
#[test]
fn ranks_are_released_when_a_detached_process_ends_instead_of_returning() {
    let (directory, path, agents) = listen(None);
    let proc = directory.path().join("proc");
    for pid in ["1", "2"] {
        fs::create_dir_all(proc.join(pid)).expect("a directory");
        fs::write(proc.join(pid).join("exe"), "").expect("a file");
    }
    let held = agents.hold_cut();
    let expected = Quiesced::expected(1, [1, 2], &proc);
    let first = return_rank(&path, 1);
    until_count(&agents, 1);
    assert_eq!(agents.await_return(&expected, SHORT).missing.len(), 1);
    drop(held);
    expect_nothing(&first);
    fs::remove_dir_all(proc.join("2")).expect("removed");
    expect_release(&first);
}

#[test]
fn restored_ranks_are_released_together_and_late_ones_when_they_return() {
    let (_directory, path, agents) = listen(None);
    let held = agents.hold_cut();
    let restored = [1, 2].map(|pid| return_rank(&path, pid));
    until_count(&agents, 2);
    restored.iter().for_each(expect_nothing);
    drop(held);
    restored.iter().for_each(expect_release);
    let late = return_rank(&path, 3);
    expect_release(&late);
    expect_nothing(&late);
    // A process that starts has nothing to be released from.
    expect_nothing(&connect_rank(&path, 4, None));
}

#[test]
fn an_agent_without_support_is_not_asked() {
    let (_directory, path, agents) = listen(None);
    let old = connect_agent(&path, 1, None);
    until_count(&agents, 1);
    let held = agents.reach_cut(LONG, None, NEVER).expect("nothing to wait for");
    assert_eq!(held.cost, None);
    drop(held);
    expect_nothing(&old);
    assert!(path.exists());
}

/// The agent has not read for so long that its order does not fit any more: the broken connection tells it.
#[test]
fn an_agent_that_cannot_be_told_loses_its_connection() {
    let (_directory, path, agents) = listen(None);
    let [stopped] = ranks(&agents, &path);
    let id = *agents.shared.lock().connections.keys().next().expect("a connection");
    let full = (0..100_000).map(|_| (id, Order::Release));
    agents.shared.lock().cut.orders.extend(full);
    agents.shared.send_orders();
    until_count(&agents, 0);
    while receive(&stopped).is_ok() {}
}

/// Two ranks in an attempt that the first one has refused: the second one has not answered it.
fn one_unanswered(agents: &Agents, path: &Path) -> [UnixStream; 2] {
    let [other, late] = ranks(agents, path);
    let refused = thread::spawn(move || {
        expect_quiesce(&other, 1);
        send(&other, &FromAgent::Failed { attempt: 1, reason: "managed memory".into(), is_lost: false });
        other
    });
    assert!(matches!(agents.quiesce(1, SHORT), Err(QuiesceError::Refused { .. })));
    let other = refused.join().expect("an agent");
    expect_quiesce(&late, 1);
    [other, late]
}

/// A cut is wanted. The second rank detaches for the earlier attempt, and the first one reports.
fn one_detaches_late(agents: &Agents, other: &UnixStream, late: UnixStream) {
    [other, &late].into_iter().for_each(|rank| expect_count(rank, 1));
    send(&late, &FromAgent::Quiesced { attempt: 1, gpu: None });
    drop(late);
    until_count(agents, 1);
    tell(other, without_communicators(1));
}

/// A process that has not answered an earlier request to detach in time does so while a cut is wanted. It comes back through
/// the socket.
#[test]
fn a_process_that_detaches_late_returns_before_the_cut() {
    let (_directory, path, agents) = listen(None);
    let [other, late] = one_unanswered(&agents, &path);
    thread::scope(|scope| {
        let reaching = scope.spawn(|| agents.reach_cut(LONG, None, NEVER));
        one_detaches_late(&agents, &other, late);
        thread::sleep(SHORT);
        assert!(path.exists() && !reaching.is_finished(), "the other one has no other way back");
        let late = return_rank(&path, 2);
        expect_count(&late, 1);
        tell(&late, without_communicators(1));
        drop(reaching.join().expect("no panic").expect("a cut"));
        [&other, &late].into_iter().for_each(expect_release);
    });
}

/// The cut fails before that process is back: it is released when it returns, with the others.
#[test]
fn a_process_that_returns_after_a_failed_cut_is_released() {
    let (_directory, path, agents) = listen(None);
    let [other, late] = one_unanswered(&agents, &path);
    thread::scope(|scope| {
        // Ends by its limit: the process that is away keeps the launcher from closing.
        let reaching = scope.spawn(|| agents.reach_cut(SHORT, None, NEVER).map(drop));
        one_detaches_late(&agents, &other, late);
        assert!(reaching.join().expect("no panic").is_err());
        let late = return_rank(&path, 2);
        [&other, &late].into_iter().for_each(expect_release);
    });
}

type Take = Arc<dyn Fn(ToLauncher) + Send + Sync>;
type Takes = Arc<parking_lot::Mutex<BTreeMap<u32, Take>>>;

/// One of two launchers, each with its own agents.
struct Lead {
    launcher: u32,
    messages: crossbeam_channel::Sender<(u32, FromLauncher)>,
    takes: Takes,
}

impl JobLead for Lead {
    fn listen(&self, take: Take) {
        self.takes.lock().insert(self.launcher, take);
    }

    fn tell(&self, message: FromLauncher) {
        self.messages.send((self.launcher, message)).expect("the coordinator lives longer");
    }
}

/// Starts their coordinator.
fn two_leads() -> [Option<Arc<dyn JobLead>>; 2] {
    let (messages, inbox) = crossbeam_channel::unbounded();
    let takes = Takes::default();
    let lead = |launcher| Lead { launcher, messages: messages.clone(), takes: Arc::clone(&takes) };
    let leads = [0, 1].map(|launcher| Some(Arc::new(lead(launcher)) as Arc<dyn JobLead>));
    thread::spawn(move || {
        let mut cut = JobCut::new(SETTINGS, 2);
        cut.begin();
        for (launcher, message) in inbox {
            cut.receive(Duration::ZERO, launcher, message);
            for (to, message) in cut.take_messages() {
                let take = Arc::clone(&takes.lock()[&to]);
                take(message);
            }
        }
    });
    leads
}

#[test]
fn ranks_of_two_launchers_are_cut_together() {
    let ((_one, first_path, first), (_two, second_path, second)) = (listen(None), listen(None));
    let ([ahead], [behind]) = (&ranks(&first, &first_path), &ranks(&second, &second_path));
    let [one, two] = two_leads();
    let [held, other] = thread::scope(|scope| {
        let reaching = scope.spawn(|| first.reach_cut(LONG, one, NEVER));
        expect_nothing(ahead);
        let other = scope.spawn(|| second.reach_cut(LONG, two, NEVER));
        for (rank, stream, sequence) in [(0, ahead, 5), (1, behind, 4)] {
            expect_count(stream, 1);
            tell(stream, report(1, 0, rank, sequence));
        }
        assert_eq!(expect_reach(ahead), (1, 5));
        tell(ahead, report(1, 1, 0, 5));
        assert_eq!(expect_reach(behind), (1, 5));
        thread::sleep(SHORT);
        assert!(!reaching.is_finished(), "the rank of the other launcher is behind");
        tell(behind, report(1, 1, 1, 5));
        [reaching, other].map(|one| one.join().expect("no panic").expect("a cut"))
    });
    assert!(!first_path.exists() && !second_path.exists(), "nobody can connect");
    assert_eq!([held.cost, other.cost].map(|cost| cost.expect("a communicator").attempts), [1, 1]);
    drop(held);
    expect_release(ahead);
    expect_nothing(behind);
    drop(other);
    expect_release(behind);
}

/// The coordinator is not heard any more: the launcher gives up, and its rank runs on. What the coordinator says later is for
/// nobody.
#[test]
fn a_launcher_without_a_coordinator_releases_its_ranks() {
    struct Deaf(parking_lot::Mutex<Option<Take>>);
    impl JobLead for Deaf {
        fn listen(&self, take: Take) {
            *self.0.lock() = Some(take);
        }
        fn tell(&self, _: FromLauncher) {}
    }
    let (_directory, path, agents) = listen(None);
    let [rank] = &ranks(&agents, &path);
    let lead = Arc::new(Deaf(parking_lot::Mutex::default()));
    let count = || ToLauncher::Order { connection: 0, order: Order::Count { attempt: 1 } };
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let error = thread::scope(|scope| {
        let reaching = scope
            .spawn(|| agents.reach_cut(LONG, Some(lead.clone()), &|| is_over.load(Ordering::Relaxed)).err());
        let take = until("the request", || lead.0.lock().clone());
        until("the request", || agents.shared.lock().cut.is_wanted.then_some(()));
        take(count());
        expect_count(rank, 1);
        is_over.store(true, Ordering::Relaxed);
        reaching.join().expect("no panic").expect("no cut")
    });
    assert!(matches!(error, QuiesceError::Withdrawn), "{error:?}");
    expect_release(rank);
    let take = lead.0.lock().clone().expect("it has listened");
    take(count());
    agents.shared.send_orders();
    expect_nothing(rank);
}
