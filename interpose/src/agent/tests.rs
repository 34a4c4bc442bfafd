//! The agent against a launcher that the test plays.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use std::time::Duration;

use ckpt_cut::{Member, MemberReport, Name, Order, Report, Role};
use ckpt_protocol::agent::{FromAgent, GpuPair, GpuReport, Hello, PROTOCOL_VERSION, ShareKey, ToAgent};
use ckpt_protocol::{descriptors, frame};

use super::serve::{End, LONGEST_POLL_INTERVAL, serve};
use crate::cuda::activity::Activity;
use crate::cuda::{AttachError, CaptureError, Delivered, DetachError, Gpu, MirrorNeeds, Request};
use crate::link::Link;
use crate::socket::Address;

/// What was done to the GPU, in its order.
static DONE: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn note(done: String) {
    DONE.lock().unwrap_or_else(PoisonError::into_inner).push(done);
}

/// What was done, once it is so much: the agent does some of it after it has told the launcher.
fn done_at_last(count: usize) -> Vec<String> {
    while DONE.lock().unwrap_or_else(PoisonError::into_inner).len() < count {
        thread::sleep(Duration::from_millis(1));
    }
    done()
}

fn done() -> Vec<String> {
    std::mem::take(&mut *DONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// How a process takes being asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Whole,
    /// Parks two pieces of memory, and fetches them again.
    Parking,
    /// Does so too, and is then too late.
    Late,
    /// Gives its time as the reason.
    Tainted,
    Lost,
    Mistaken,
}

struct Played {
    kind: Kind,
    is_detached: bool,
    /// What a rank that stands at its targets reports.
    steps: Option<Report>,
}

impl Gpu for Played {
    fn activity(&self) -> Activity {
        Activity { calls: 6, is_waiting: true }
    }

    fn members(&self) -> Vec<MemberReport> {
        vec![member()]
    }

    fn follow(&mut self, order: Order) {
        let (attempt, version) = match order {
            Order::Count { attempt } => (attempt, 0),
            Order::Reach { attempt, version, .. } => (attempt, version),
            Order::Release => {
                self.steps.take().into_iter().for_each(|_| note("run on".to_owned()));
                return;
            }
        };
        self.steps = Some(report(attempt, version));
    }

    fn steps(&mut self) -> Option<Report> {
        self.steps.clone()
    }

    fn check(&mut self) -> Result<(), DetachError> {
        if self.kind == Kind::Tainted { Err(DetachError::Obstacle("no".to_owned())) } else { Ok(()) }
    }

    fn ranks_on(&self) -> Vec<String> {
        vec!["GPU-1".to_owned()]
    }

    fn mirror_needs(&mut self, _: &mut dyn Link) -> Result<MirrorNeeds, AttachError> {
        match self.kind {
            Kind::Lost => Err(AttachError::Lost),
            Kind::Mistaken => panic!("a mistake"),
            _ => Ok(MirrorNeeds { bytes: 4096, used_bytes: 40, changes: None }),
        }
    }

    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError> {
        let mirror_bytes = mirror.bytes;
        note(format!("stage {} {} {}", mirror.id, mirror.bytes, content(mirror.file)));
        if self.kind == Kind::Tainted { Err(CaptureError::MirrorTooLarge(mirror_bytes)) } else { Ok(()) }
    }

    fn unstage(&mut self) {
        note("unstage".to_owned());
    }

    fn detach(
        &mut self,
        Request { timeout, park, .. }: Request,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, DetachError> {
        match self.kind {
            Kind::Tainted => return Err(DetachError::Obstacle(format!("not in {timeout:?}"))),
            Kind::Mistaken => panic!("a mistake"),
            Kind::Parking | Kind::Late if park => {
                let files = [file("one"), file("two")];
                let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                let (answer, _) = link.ask(&parks(), &borrowed).expect("an answer");
                assert_eq!(answer, ToAgent::Parked { is_kept: true });
                if self.kind == Kind::Late {
                    return Err(DetachError::Obstacle("too late".to_owned()));
                }
            }
            _ => {}
        }
        note(format!("detach {}", timeout.as_millis()));
        self.is_detached = true;
        Ok(Some(GpuReport { parked_bytes: 7, ..GpuReport::default() }))
    }

    fn release(&mut self, timeout: Duration) -> Result<(), DetachError> {
        note(format!("release {}", timeout.as_millis()));
        if self.kind == Kind::Lost { Err(DetachError::Lost) } else { Ok(()) }
    }

    fn undo(&mut self, _: &mut dyn Link) -> Result<(), AttachError> {
        note("undo".to_owned());
        Ok(())
    }

    fn is_detached(&self) -> bool {
        self.is_detached
    }

    fn attach(
        &mut self,
        mirror: Option<Delivered>,
        _pairs: &[GpuPair],
        link: &mut dyn Link,
    ) -> Result<u64, AttachError> {
        self.is_detached = false;
        if self.kind == Kind::Lost {
            return Err(AttachError::Lost);
        }
        note(format!("attach {:?}", mirror.map(|mirror| (mirror.id, mirror.bytes, content(mirror.file)))));
        if self.kind == Kind::Parking {
            let (_, files) = link.ask(&unparks(), &[]).expect("an answer");
            note(files.into_iter().map(content).collect());
        }
        Ok(11)
    }
}

fn parks() -> FromAgent {
    FromAgent::Park { pid: std::process::id(), keys: vec![ShareKey(1), ShareKey(2)], instance: 0 }
}

fn unparks() -> FromAgent {
    FromAgent::Unpark { pid: std::process::id(), keys: vec![ShareKey(1), ShareKey(2)] }
}

fn member() -> MemberReport {
    let member = Member { communicator: Name(4), index: 1 };
    let role = Role::Communicator { awaits: None, alias: None };
    MemberReport { member, role, sequence: 3, call: "ncclAllReduce".to_owned() }
}

fn activity() -> FromAgent {
    FromAgent::Activity { calls: 6, is_waiting: true, members: vec![member()] }
}

fn report(attempt: u64, version: u64) -> Report {
    Report { attempt, version, in_call: 0, members: Vec::new(), parked: Vec::new() }
}

fn file(text: &str) -> OwnedFd {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(text.as_bytes()).expect("written");
    file.into()
}

fn content(file: OwnedFd) -> String {
    let (mut file, mut text) = (File::from(file), String::new());
    file.rewind().expect("rewound");
    file.read_to_string(&mut text).expect("read");
    text
}

struct Launcher {
    listener: UnixListener,
    agent: JoinHandle<End>,
    directory: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Launcher {
    fn of(kind: Kind) -> Self {
        let turn = crate::socket::tests::turn();
        done();
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("agents");
        let listener = UnixListener::bind(&path).expect("listening");
        let agent = thread::spawn(move || {
            serve(&address(&path), &mut Played { kind, is_detached: false, steps: None })
        });
        Self { listener, agent, directory, _turn: turn }
    }

    /// The agent's next connection, up to the welcome.
    fn welcomes(&self) -> (UnixStream, Hello) {
        let (mut stream, _) = self.listener.accept().expect("an agent");
        let FromAgent::Hello(hello) = hear(&mut stream) else { panic!("not a hello") };
        tell(&mut stream, &ToAgent::Welcome { version: PROTOCOL_VERSION });
        (stream, hello)
    }

    /// Sends the agent away for good; returns what it has done to the GPU and nobody has asked for.
    fn ends(self, mut stream: UnixStream) -> Vec<String> {
        tell(&mut stream, &ToAgent::Refused { reason: "the end".to_owned() });
        assert_eq!(self.agent.join().expect("an agent"), End::Silent);
        done()
    }
}

fn address(path: &Path) -> Address {
    Address::new(path.as_os_str().as_bytes()).expect("an address")
}

fn tell(stream: &mut UnixStream, message: &ToAgent) {
    frame::write(stream, message).expect("told");
}

fn hear(stream: &mut UnixStream) -> FromAgent {
    frame::read(stream).expect("a message")
}

fn quiesce(stream: &mut UnixStream, attempt: u64) {
    tell(
        stream,
        &ToAgent::Quiesce { attempt, timeout_ms: 700, park: false, park_by_key: true, measures: false },
    );
}

fn goes(stream: &mut UnixStream, attempt: u64) {
    let gpu = Some(GpuReport { parked_bytes: 7, ..GpuReport::default() });
    assert_eq!(hear(stream), FromAgent::Quiesced { attempt, gpu });
}

fn deliver(stream: &mut UnixStream, text: &str) {
    let bytes = text.len() as u64;
    let (pairs, is_partial, may_stay) = (Vec::new(), false, true);
    tell(
        stream,
        &ToAgent::Deliver { mirror: 5, bytes, parked: 0, pairs, is_partial, may_stay, copy_threads: 3 },
    );
    if bytes > 0 {
        descriptors::send(stream.as_fd(), &[file(text).as_fd()]).expect("sent");
    }
}

fn order(stream: &mut UnixStream, order: Order) {
    tell(stream, &ToAgent::Cut { order });
}

/// Brings the agent to a cut.
fn cut(stream: &mut UnixStream, attempt: u64) {
    order(stream, Order::Count { attempt });
    assert_eq!(hear(stream), FromAgent::Steps { report: report(attempt, 0) });
    order(stream, Order::Reach { attempt, version: 1, targets: Vec::new(), is_open: false });
    assert_eq!(hear(stream), FromAgent::Steps { report: report(attempt, 1) });
}

fn back(attempt: u64) -> FromAgent {
    FromAgent::Reconnected { attempt, restored: false, copied_bytes: 11, lost: None }
}

#[test]
fn what_cannot_be_taken_off_the_gpu_is_said_and_the_agent_stays() {
    let launcher = Launcher::of(Kind::Tainted);
    let (mut stream, _) = launcher.welcomes();
    for attempt in [1, 2] {
        quiesce(&mut stream, attempt);
        let reason = "not in 700ms".to_owned();
        assert_eq!(hear(&mut stream), FromAgent::Failed { attempt, reason, is_lost: false });
    }
    assert_eq!(launcher.ends(stream), ["unstage"]);
}

#[test]
fn a_mistake_is_a_reason_too_and_is_undone() {
    let launcher = Launcher::of(Kind::Mistaken);
    let (mut stream, _) = launcher.welcomes();
    quiesce(&mut stream, 1);
    let FromAgent::Failed { attempt: 1, reason, is_lost: false } = hear(&mut stream) else {
        panic!("not a failure")
    };
    assert!(reason.contains("mistake"), "{reason}");
    assert_eq!(launcher.ends(stream), ["undo", "unstage"]);
}

fn needs(attempt: u64) -> FromAgent {
    FromAgent::Needs {
        attempt,
        mirror_bytes: 4096,
        used_bytes: Some(40),
        changes: None,
        ranks_on: vec!["GPU-1".to_owned()],
    }
}

const STAGE: ToAgent = ToAgent::Stage {
    attempt: 3,
    mirror: 8,
    bytes: 4,
    more_bytes: Some(1),
    is_partial: false,
    copy_threads: 0,
};

#[test]
fn a_mirror_is_staged_and_let_go_of() {
    let launcher = Launcher::of(Kind::Whole);
    let (mut stream, _) = launcher.welcomes();
    tell(&mut stream, &ToAgent::Prepare { attempt: 3 });
    assert_eq!(hear(&mut stream), needs(3));
    tell(&mut stream, &STAGE);
    descriptors::send(stream.as_fd(), &[file("mine").as_fd()]).expect("sent");
    assert_eq!(hear(&mut stream), FromAgent::Staged { attempt: 3 });
    tell(&mut stream, &ToAgent::Unstage { attempt: 3 });
    assert_eq!(launcher.ends(stream), ["stage 8 4 mine", "unstage", "unstage"]);
}

#[test]
fn what_rules_a_checkpoint_out_is_said_before_it() {
    let launcher = Launcher::of(Kind::Tainted);
    let (mut stream, _) = launcher.welcomes();
    tell(&mut stream, &ToAgent::Prepare { attempt: 3 });
    assert_eq!(hear(&mut stream), FromAgent::Failed { attempt: 3, reason: "no".to_owned(), is_lost: false });
    assert_eq!(launcher.ends(stream), ["unstage"]);
}

#[test]
fn a_mirror_that_cannot_be_staged_is_a_failure() {
    let launcher = Launcher::of(Kind::Tainted);
    let (mut stream, _) = launcher.welcomes();
    tell(&mut stream, &STAGE);
    descriptors::send(stream.as_fd(), &[file("mine").as_fd()]).expect("sent");
    let reason = CaptureError::MirrorTooLarge(4).to_string();
    assert_eq!(hear(&mut stream), FromAgent::Failed { attempt: 3, reason, is_lost: false });
    assert_eq!(launcher.ends(stream), ["stage 8 4 mine", "unstage"]);
}

#[test]
fn parked_memory_goes_and_comes_in_the_conversation() {
    let launcher = Launcher::of(Kind::Parking);
    let (mut stream, _) = launcher.welcomes();
    quiesce(&mut stream, 1);
    assert_eq!(hear(&mut stream), parks());
    let parked = descriptors::receive(stream.as_fd(), 2).expect("received");
    tell(&mut stream, &ToAgent::Parked { is_kept: true });
    goes(&mut stream, 1);
    let (mut stream, hello) = launcher.welcomes();
    assert!(hello.is_detached);
    deliver(&mut stream, "");
    assert_eq!(hear(&mut stream), unparks());
    tell(&mut stream, &ToAgent::Unparked { count: 2 });
    let borrowed: Vec<_> = parked.iter().map(AsFd::as_fd).collect();
    descriptors::send(stream.as_fd(), &borrowed).expect("sent");
    assert_eq!(hear(&mut stream), back(1));
    let done = launcher.ends(stream);
    assert_eq!(done, ["detach 700", "unstage", "attach None", "onetwo", "unstage"]);
}

/// A launcher that has given an attempt up does not wait for its end.
#[test]
fn what_is_said_while_an_answer_is_waited_for_is_heard_later() {
    let launcher = Launcher::of(Kind::Late);
    let (mut stream, _) = launcher.welcomes();
    quiesce(&mut stream, 1);
    assert_eq!(hear(&mut stream), parks());
    tell(&mut stream, &ToAgent::Unstage { attempt: 1 });
    tell(&mut stream, &ToAgent::QueryActivity);
    tell(&mut stream, &ToAgent::Prepare { attempt: 2 });
    descriptors::receive(stream.as_fd(), 2).expect("received");
    tell(&mut stream, &ToAgent::Parked { is_kept: true });
    let failed = FromAgent::Failed { attempt: 1, reason: "too late".into(), is_lost: false };
    assert_eq!(hear(&mut stream), failed);
    assert_eq!(hear(&mut stream), activity());
    assert_eq!(hear(&mut stream), needs(2));
    assert_eq!(launcher.ends(stream), ["unstage", "unstage"]);
}

#[test]
fn the_gpus_state_is_put_back_with_what_is_delivered_and_once_only() {
    let launcher = Launcher::of(Kind::Whole);
    let (mut stream, _) = launcher.welcomes();
    let path = launcher.directory.path().join("agents");
    let hidden = launcher.directory.path().join("hidden");
    std::fs::rename(&path, &hidden).expect("hidden");
    quiesce(&mut stream, 1);
    goes(&mut stream, 1);
    assert!(frame::read::<FromAgent>(&mut stream).is_err(), "it has gone away");
    assert_eq!(done_at_last(2), ["detach 700", "unstage"]);
    // Time for many looks.
    thread::sleep(LONGEST_POLL_INTERVAL * 4);
    assert_eq!(done(), [""; 0], "the launcher is not there yet");
    std::fs::rename(&hidden, &path).expect("shown");
    // A connection that breaks before anything is delivered.
    let (broken, hello) = launcher.welcomes();
    assert_eq!((hello.away, hello.is_detached), (Some(1), true));
    drop(broken);
    // One that breaks before the agent has said that it is back.
    let (mut broken, _) = launcher.welcomes();
    broken.shutdown(std::net::Shutdown::Read).expect("shut");
    deliver(&mut broken, "memory");
    drop(broken);
    let (mut stream, hello) = launcher.welcomes();
    assert_eq!((hello.away, hello.is_detached), (Some(1), false));
    assert_eq!(hear(&mut stream), back(1));
    let done = launcher.ends(stream);
    assert_eq!(done, ["unstage", "attach Some((5, 6, \"memory\"))", "unstage", "unstage"]);
}

#[test]
fn state_that_is_lost_is_told() {
    let launcher = Launcher::of(Kind::Lost);
    let (mut stream, _) = launcher.welcomes();
    quiesce(&mut stream, 4);
    goes(&mut stream, 4);
    let (mut stream, _) = launcher.welcomes();
    deliver(&mut stream, "");
    let lost = Some(AttachError::Lost.to_string());
    assert_eq!(
        hear(&mut stream),
        FromAgent::Reconnected { attempt: 4, restored: false, copied_bytes: 0, lost }
    );
    launcher.ends(stream);
}

#[test]
fn a_farewell_that_nobody_hears_is_an_absence_all_the_same() {
    let launcher = Launcher::of(Kind::Whole);
    let (mut stream, _) = launcher.welcomes();
    // The agent can read from now on, but not write.
    stream.shutdown(std::net::Shutdown::Read).expect("shut");
    quiesce(&mut stream, 9);
    let (mut stream, hello) = launcher.welcomes();
    assert_eq!(hello.away, Some(9));
    deliver(&mut stream, "");
    assert_eq!(hear(&mut stream), back(9));
    assert_eq!(launcher.ends(stream), ["detach 700", "unstage", "attach None", "unstage"]);
}

#[test]
fn orders_of_a_cut_are_followed_and_reports_are_sent_once() {
    let launcher = Launcher::of(Kind::Whole);
    let (mut stream, hello) = launcher.welcomes();
    assert!(hello.supports_cut && hello.supports_reads && hello.supports_loads && hello.parks_by_key);
    cut(&mut stream, 1);
    // Nothing else is sent while nothing changes, and other requests are answered.
    thread::sleep(LONGEST_POLL_INTERVAL);
    tell(&mut stream, &ToAgent::QueryActivity);
    assert_eq!(hear(&mut stream), activity());
    order(&mut stream, Order::Release);
    cut(&mut stream, 2);
    assert_eq!(launcher.ends(stream), ["run on", "unstage", "run on"]);
}

#[test]
fn a_rank_whose_launcher_is_lost_runs_on() {
    let launcher = Launcher::of(Kind::Whole);
    let (mut stream, _) = launcher.welcomes();
    cut(&mut stream, 1);
    drop(stream);
    let (mut stream, _) = launcher.welcomes();
    assert_eq!(done(), ["unstage", "run on"]);
    order(&mut stream, Order::Count { attempt: 7 });
    assert_eq!(hear(&mut stream), FromAgent::Steps { report: report(7, 0) });
    launcher.ends(stream);
}

#[test]
fn a_rank_that_has_come_back_stands_at_the_cut_until_it_is_released() {
    let launcher = Launcher::of(Kind::Whole);
    let (mut stream, _) = launcher.welcomes();
    cut(&mut stream, 1);
    quiesce(&mut stream, 4);
    goes(&mut stream, 4);
    let (broken, _) = launcher.welcomes();
    drop(broken);
    let (mut stream, _) = launcher.welcomes();
    deliver(&mut stream, "");
    assert_eq!(hear(&mut stream), back(4));
    tell(&mut stream, &ToAgent::QueryActivity);
    assert_eq!(hear(&mut stream), activity(), "no report unasked");
    assert_eq!(done(), ["detach 700", "unstage", "unstage", "attach None"]);
    order(&mut stream, Order::Release);
    assert_eq!(launcher.ends(stream), ["run on", "unstage"]);
}
