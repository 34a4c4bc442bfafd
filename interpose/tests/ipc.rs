//! Processes that share device memory by CUDA IPC, with the test as the launcher that passes it on.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use ckpt_protocol::agent::{FromAgent, ShareKey, ToAgent};
use ckpt_protocol::{descriptors, frame};
use common::launcher::{self, Agent, Kept};
use common::program::{self, Program};
use common::until;

const LARGE: u64 = 4 << 20;
const INVALID_VALUE: &str = "error 1";
const INVALID_CONTEXT: &str = "error 201";

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| program::program("ipc"));

/// What the launcher has heard.
#[derive(Default)]
struct Heard {
    /// Connections of agents, by process ID.
    agents: BTreeMap<u32, Agent>,
    /// What they need when they are back.
    kept: BTreeMap<u32, Kept>,
    memory: BTreeMap<ShareKey, (Arc<OwnedFd>, u64)>,
    /// Each message about memory in a word, with who has sent it.
    said: Vec<(u32, &'static str)>,
    /// So many times memory that is not there may still come.
    may_come: u32,
}

/// A launcher, and a directory for what its job needs.
struct Launcher {
    directory: tempfile::TempDir,
    heard: Arc<Mutex<Heard>>,
}

impl Launcher {
    fn new() -> Self {
        let directory = common::directory();
        let launcher = Self { directory, heard: Arc::default() };
        launcher.listen();
        launcher
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// Listens until the path is taken away.
    fn listen(&self) {
        let path = self.socket();
        let listener = launcher::listen(&path);
        let heard = Arc::clone(&self.heard);
        std::thread::spawn(move || {
            while path.exists() {
                let Some(stream) = launcher::accept(&listener) else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let heard = Arc::clone(&heard);
                // One may wait for what another brings.
                std::thread::spawn(move || meet(&heard, stream));
            }
        });
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().expect("no test has failed")
    }

    fn said(&self) -> Vec<(u32, &'static str)> {
        std::mem::take(&mut self.heard().said)
    }

    fn start(&self) -> Program {
        let mut command = program::plain(&PROGRAM, self.directory.path());
        program::interpose(&mut command, &self.socket());
        let mut program = Program::start({
            command.env("SIMCUDA_MEMORY", "64MiB");
            command
        });
        assert_eq!(program.line(), "ready");
        program
    }

    fn agent_of(&self, program: &Program) -> Agent {
        until("the program's agent", || self.heard().agents.remove(&program.pid()))
    }
}

/// Plays the launcher on a connection: an agent's until it is back, another one for a message.
fn meet(heard: &Mutex<Heard>, stream: UnixStream) {
    let Ok(message) = frame::read::<FromAgent>(&mut &stream) else { return };
    let FromAgent::Hello(hello) = message else { return answer(heard, &stream, message) };
    let agent = Agent { stream, hello };
    agent.say(&ToAgent::answer(&agent.hello));
    let kept = heard.lock().expect("no test has failed").kept.remove(&agent.hello.pid);
    kept.unwrap_or_else(|| Kept::new(0)).deliver(&agent);
    while agent.hello.away.is_some() {
        match agent.hear() {
            FromAgent::Reconnected { lost, .. } => {
                assert_eq!(lost, None);
                break;
            }
            message => answer(heard, &agent.stream, message),
        }
    }
    heard.lock().expect("no test has failed").agents.insert(agent.hello.pid, agent);
}

/// Answers a message about memory.
fn answer(heard: &Mutex<Heard>, stream: &UnixStream, message: FromAgent) {
    let mut memory = None;
    let mut heard = heard.lock().expect("no test has failed");
    let answer = match message {
        FromAgent::Publish { pid, key, bytes, .. } => {
            let received = descriptors::receive(stream.as_fd(), 1).expect("memory").swap_remove(0);
            heard.said.push((pid, "publish"));
            heard.memory.insert(key, (Arc::new(received), bytes));
            ToAgent::Published { is_kept: true }
        }
        FromAgent::Fetch { pid, key, .. } => {
            heard.said.push((pid, "fetch"));
            memory = heard.memory.get(&key).cloned();
            let is_final = memory.is_some() || heard.may_come == 0;
            heard.may_come = heard.may_come.saturating_sub(1);
            match &memory {
                Some((_, bytes)) => ToAgent::Shared { bytes: *bytes },
                None => ToAgent::NotShared { is_final },
            }
        }
        FromAgent::Withdraw { pid, keys } => {
            heard.said.extend(keys.iter().map(|_| (pid, "withdraw")));
            ToAgent::Withdrawn
        }
        message => panic!("{message:?}"),
    };
    frame::write(&mut &*stream, &answer).expect("told");
    let memory: Vec<_> = memory.iter().map(|(memory, _)| memory.as_fd()).collect();
    descriptors::send(stream.as_fd(), &memory).expect("sent");
}

/// Has a program do something that gives an address or a handle.
fn gives(program: &mut Program, line: &str) -> String {
    let answer = program.does(line);
    assert!(!answer.starts_with("error") && answer.len() > 2, "{line}: {answer}");
    answer
}

/// An allocation that holds a number; its address and its handle.
fn shared(owner: &mut Program, bytes: u64, number: u32) -> (String, String) {
    let address = gives(owner, &format!("alloc {bytes}"));
    assert_eq!(owner.does(&format!("fill {address} {number} {}", bytes / 4)), "ok");
    let handle = gives(owner, &format!("get {address}"));
    (address, handle)
}

#[test]
fn an_allocation_of_another_process_is_the_same_memory() {
    let launcher = Launcher::new();
    let [mut owner, mut importer] = [launcher.start(), launcher.start()];
    let (address, handle) = shared(&mut owner, LARGE, 5);
    assert!(handle.starts_with("434b505449504331"), "{handle}");
    let opened = gives(&mut importer, &format!("open {handle}"));
    assert_eq!(importer.does(&format!("look {opened}")), format!("5 at 0 of {LARGE}"));
    assert_eq!(importer.does(&format!("fill {opened} 6 16")), "ok");
    assert_eq!(owner.does(&format!("look {address}")), format!("6 at 0 of {LARGE}"));
    // As often as it is opened, it has to be closed.
    assert_eq!(gives(&mut importer, &format!("open-legacy {handle}")), opened);
    assert_eq!(importer.does(&format!("free {opened}")), INVALID_VALUE);
    assert_eq!(importer.does(&format!("close {opened}")), "ok");
    assert_eq!(importer.does(&format!("look {opened}")), format!("6 at 0 of {LARGE}"));
    assert_eq!(launcher.said(), [(owner.pid(), "publish"), (importer.pid(), "fetch")]);
    assert_eq!(importer.does(&format!("close {opened}")), "ok");
    assert_eq!(importer.does(&format!("look {opened}")), INVALID_VALUE);
    assert_eq!(importer.does(&format!("close {opened}")), INVALID_VALUE);
    assert_eq!(owner.does(&format!("free {address}")), "ok");
    assert_eq!(launcher.said(), [(importer.pid(), "withdraw"), (owner.pid(), "withdraw")]);
}

#[test]
fn small_allocations_share_one_piece_and_keep_their_places_in_it() {
    let launcher = Launcher::new();
    let [mut owner, mut importer] = [launcher.start(), launcher.start()];
    let (first, first_handle) = shared(&mut owner, 1024, 7);
    let (second, second_handle) = shared(&mut owner, 3000, 8);
    assert_ne!(first_handle, second_handle);
    assert_eq!(gives(&mut owner, &format!("get {first}")), first_handle);
    let number = |text: &str| u64::from_str_radix(&text[2..], 16).expect("an address");
    let opened =
        [&first_handle, &second_handle].map(|handle| gives(&mut importer, &format!("open {handle}")));
    let apart = number(&second).wrapping_sub(number(&first));
    assert_eq!(number(&opened[1]).wrapping_sub(number(&opened[0])), apart);
    assert_eq!(importer.does(&format!("look {}", opened[0])), "7 at 0 of 1024");
    assert_eq!(importer.does(&format!("look {}", opened[1])), "8 at 0 of 3000");
    assert_eq!(launcher.said(), [(owner.pid(), "publish"), (importer.pid(), "fetch")]);
    assert_eq!(importer.does(&format!("close {}", opened[0])), "ok");
    assert!(importer.does(&format!("look {}", opened[0])).starts_with("error"), "it is in nothing any more");
    assert_eq!(importer.does(&format!("look {}", opened[1])), "8 at 0 of 3000");
    // The other one is still in the piece.
    assert_eq!(owner.does(&format!("free {first}")), "ok");
    assert_eq!(launcher.said(), []);
    assert_eq!(importer.does(&format!("close {}", opened[1])), "ok");
    assert_eq!(launcher.said(), [(importer.pid(), "withdraw")]);
}

#[test]
fn two_processes_share_with_each_other_and_with_a_third() {
    let launcher = Launcher::new();
    let mut programs = [launcher.start(), launcher.start(), launcher.start()];
    let mut handles = Vec::new();
    for (program, number) in programs.iter_mut().zip(1..) {
        handles.push(shared(program, LARGE, number).1);
    }
    for (place, program) in programs.iter_mut().enumerate() {
        for (number, handle) in handles.iter().enumerate() {
            if place == number {
                assert_eq!(program.does(&format!("open {handle}")), INVALID_CONTEXT, "its own");
            } else {
                let opened = gives(program, &format!("open {handle}"));
                assert!(program.does(&format!("look {opened}")).starts_with(&format!("{} at", number + 1)));
            }
        }
    }
}

#[test]
fn what_nobody_has_given_out_or_has_freed_is_refused() {
    let launcher = Launcher::new();
    let [mut owner, mut importer] = [launcher.start(), launcher.start()];
    let (address, handle) = shared(&mut owner, LARGE, 5);
    let flipped = if &handle[20..21] == "0" { "1" } else { "0" };
    let damaged = format!("{}{flipped}{}", &handle[..20], &handle[21..]);
    assert_eq!(importer.does(&format!("open {damaged}")), INVALID_VALUE);
    assert_eq!(importer.does(&format!("open {}", "00".repeat(64))), INVALID_VALUE);
    assert_eq!(owner.does("get 0x1234"), INVALID_VALUE);
    assert_eq!(owner.does(&format!("get {:#x}", 0x100 + u64::from_str_radix(&address[2..], 16).unwrap())), {
        INVALID_VALUE
    });
    launcher.heard().memory.clear();
    assert_eq!(importer.does(&format!("open {handle}")), INVALID_VALUE);
    // An owner that is not there will not publish it either.
    launcher.heard().may_come = u32::MAX;
    drop(owner);
    assert_eq!(importer.does(&format!("open {handle}")), INVALID_VALUE);
}

#[test]
fn memory_that_its_owner_is_putting_back_is_waited_for() {
    let launcher = Launcher::new();
    let [mut owner, mut importer] = [launcher.start(), launcher.start()];
    let (_, handle) = shared(&mut owner, LARGE, 5);
    let memory = std::mem::take(&mut launcher.heard().memory);
    launcher.heard().may_come = u32::MAX;
    importer.say(&format!("open {handle}"));
    until("two questions", || (launcher.heard().said.len() > 2).then_some(()));
    launcher.heard().memory = memory;
    let opened = importer.line();
    assert_eq!(importer.does(&format!("look {opened}")), format!("5 at 0 of {LARGE}"));
}

/// A call that needs the launcher while there is none waits outside of the gate, so that its process can be saved.
#[test]
fn a_checkpoint_may_come_in_between() {
    let launcher = Launcher::new();
    let [mut owner, mut importer] = [launcher.start(), launcher.start()];
    let handle = shared(&mut owner, LARGE, 5).1;
    let freed = shared(&mut owner, LARGE, 6).0;
    let unshared = gives(&mut owner, &format!("alloc {LARGE}"));
    let agents = [launcher.agent_of(&owner), launcher.agent_of(&importer)];
    // Shared memory may not stay on the GPU.
    let mut kept = [1, 2].map(Kept::new);
    for (agent, kept) in agents.iter().zip(&mut kept) {
        kept.stage(agent, 1);
    }
    fs::remove_file(launcher.socket()).expect("removed");
    launcher.said();
    importer.say(&format!("open {handle}"));
    assert_eq!(owner.does(&format!("free {freed}")), "ok", "nobody waits to say that");
    owner.say(&format!("get {unshared}"));
    for (agent, mut kept) in agents.iter().zip(kept) {
        let answer = kept.quiesce(agent, 1, false);
        assert!(matches!(answer, FromAgent::Quiesced { attempt: 1, .. }), "{answer:?}");
        launcher.heard().kept.insert(agent.hello.pid, kept);
    }
    assert_eq!(launcher.said(), []);
    launcher.listen();
    let opened = importer.line();
    assert!(opened.starts_with("0x"), "{opened}");
    assert!(owner.line().starts_with("434b505449504331"));
    assert_eq!(importer.does(&format!("look {opened}")), format!("5 at 0 of {LARGE}"));
    let said = launcher.said();
    // What was freed is told by the agent, before it goes.
    for what in [(owner.pid(), "publish"), (importer.pid(), "fetch")] {
        assert_eq!(said.iter().filter(|said| **said == what).count(), 1, "{what:?} in {said:?}");
    }
}
