//! The agent: one thread in each process of the job, which answers the launcher.
//!
//! ```text
//!                                    Quiesce, and the GPU's state cannot be taken off it: Failed
//!                                  +--+
//!              launcher is there   |  v     Quiesce, GPU's state is off, Quiesced
//!   Starting --------------------> Connected ------------------------> Away
//!      ^  |                        ^  |    |                            |
//!      |  | not there,             |  |    | Refused,                   | launcher is there again:
//!      |  | MOST_TRIES             |  |    | not understood             | Hello{away}, Deliver,
//!      |  v                        |  |    v                            | GPU's state is put back, Back
//!      |  Silent                   |  |    Silent                       |
//!      |                           +--|---------------------------------+
//!      +------------------------------+
//!            connection lost
//! ```
//!
//! Away, the agent holds no descriptor, and nothing that a dump could stumble over: it looks every now and
//! then whether the launcher's socket is in the file system, and makes a socket of its own only then. The
//! launcher takes the path away before a dump and puts it back afterwards. Being dumped, let go on or restored
//! happens somewhere in there and the agent cannot feel it; that the process was made anew shows in its start
//! time.
//!
//! Away is also where an agent goes that took the state off the GPU and then found the connection lost: the
//! process waits for its state, and the launcher that comes back may have dumped it all the same. What is away
//! comes back before anything else, even where the main thread has ended meanwhile.
//!
//! A forked child starts over with an agent of its own. Silent is for ever, in children too.
//!
//! A process whose main thread ends by `pthread_exit` ends when its last thread does, which must not be the
//! agent: it leaves as soon as the main thread has, or as soon as it is back.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use ckpt_protocol::agent::{FromAgent, GpuReport, Hello, PROTOCOL_VERSION, ToAgent};
use ckpt_protocol::frame::FrameError;

use crate::cuda::activity::Activity;
use crate::cuda::{Delivered, Refusal};
use crate::link::{self, Conversation, Link};
use crate::socket::{Address, Socket};
use crate::{cuda, fork, launcher, process};

/// How long to wait between two looks for the launcher, first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// How many looks a launcher is given that was never there or was lost: about a minute. A process can be
/// started while the launcher prepares a dump, so this has to outlast that.
const MOST_TRIES: u32 = 1200;
/// What an agent that is away waits for later on, when it is clear that the launcher takes its time.
const PATIENT_AFTER: u32 = 1200;
const PATIENT_WAIT: Duration = Duration::from_millis(500);

/// The driver's own code runs on it; what the process does not touch costs nothing.
const STACK_BYTES: usize = 2 << 20;

/// The start time of the process when its agent was started; 0 where `/proc` cannot be read.
static STARTED_TICKS: AtomicU64 = AtomicU64::new(0);
/// Notices the end of the main thread.
static MAIN_THREAD: OnceLock<libc::pthread_key_t> = OnceLock::new();
static MAIN_THREAD_ENDED: AtomicBool = AtomicBool::new(false);

/// Starts the agent of a process at its very beginning, on the main thread.
pub fn install(address: Address) {
    // An allocator that the job brings along may have fork handlers too, and they have to come before ours,
    // which starts a thread: children run the handlers in the order of their registration. Being asked for
    // memory makes every allocator register them.
    drop(std::hint::black_box(Box::new(0_u8)));
    if !launcher::set_address(address) || !fork::install(restart_in_child) {
        return;
    }
    let mut key = 0;
    // SAFETY: `key` is writable; the destructor is a function of this library, which stays mapped.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(main_thread_ends)) } != 0 {
        return;
    }
    if MAIN_THREAD.set(key).is_ok() {
        start();
    }
}

/// Starts an agent in a forked child, on its only thread.
fn restart_in_child() {
    cuda::after_fork_in_child();
    // The parent's connection. The agent that it belonged to was not copied.
    drop(Socket::noted());
    MAIN_THREAD_ENDED.store(false, SeqCst);
    start();
}

/// Starts the agent's thread. The calling thread is the process's only one, so this is the place for what
/// takes descriptors: nobody can be counting on the number that comes next. (After a checkpoint it cannot be
/// helped that the agent has a low number for some microseconds, in which an application that closes a number
/// to get the same one again would be disappointed.)
fn start() {
    let (Some(address), Some(&key)) = (launcher::address(), MAIN_THREAD.get()) else { return };
    // Any value but null, so that the key's destructor runs for this thread.
    // SAFETY: the key was created and is never deleted; the value is never read through.
    if unsafe { libc::pthread_setspecific(key, (&raw const MAIN_THREAD).cast()) } != 0 {
        return;
    }
    STARTED_TICKS.store(process::start_time_ticks().unwrap_or(0), SeqCst);
    if address.exists()
        && let Ok(socket) = Socket::open()
    {
        socket.keep();
    }
    if !spawn() {
        drop(Socket::noted());
    }
}

/// Makes the thread, with all signals blocked: those are for the application's threads.
fn spawn() -> bool {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset writes the set that it is given room for. It leaves out what the C library needs.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was filled just now, `before` has room for a set.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) } != 0 {
        return false;
    }
    let made = make_thread();
    // SAFETY: the first call succeeded, so `before` holds the thread's mask; null: the old one is not asked.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    made
}

fn make_thread() -> bool {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: pthread_attr_init writes the attributes that it is given room for.
    if unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the attributes are initialised. A size that is refused leaves the default in place.
    unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES) };
    // A program with very much thread-local storage leaves no room on a small stack.
    let made = create(attributes.as_ptr()) || create(null());
    // SAFETY: the attributes are initialised, and not used any more.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    made
}

/// Takes initialised attributes, or null for the default ones.
fn create(attributes: *const libc::pthread_attr_t) -> bool {
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: `thread` has room for the ID, the callers pass attributes as promised, and `thread_main` takes
    // any argument and does not unwind.
    unsafe { libc::pthread_create(thread.as_mut_ptr(), attributes, thread_main, null_mut()) == 0 }
}

extern "C" fn thread_main(_: *mut c_void) -> *mut c_void {
    // SAFETY: takes no argument; it names the calling thread.
    let this = unsafe { libc::pthread_self() };
    // SAFETY: the thread was made joinable, and nobody has kept its ID to join it.
    unsafe { libc::pthread_detach(this) };
    // SAFETY: PR_SET_NAME reads a NUL-terminated string of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"ckpt-agent".as_ptr()) };
    let life = || launcher::address().map_or(End::Silent, |address| serve(address, &mut cuda::Gpu::new()));
    if !catch_unwind(life).is_ok_and(|end| end == End::MainThread) {
        launcher::silence();
    }
    null_mut()
}

/// Runs on the main thread when it ends by itself and not with the whole process.
extern "C" fn main_thread_ends(_: *mut c_void) {
    MAIN_THREAD_ENDED.store(true, SeqCst);
    if let Some(socket) = Socket::noted() {
        socket.hang_up();
        // It is the agent's, which wakes now and closes it.
        socket.keep();
    }
}

/// The state of the process on its GPUs, as far as the agent has to do with it.
trait Gpu {
    /// See [`cuda::activity::look`].
    fn activity(&self) -> Activity;
    /// See [`cuda::Gpu::mirror_bytes`].
    fn mirror_bytes(&mut self) -> u64;
    /// See [`cuda::Gpu::stage`].
    fn stage(&mut self, mirror: Delivered) -> Result<(), String>;
    /// See [`cuda::Gpu::unstage`].
    fn unstage(&mut self);
    /// See [`cuda::Gpu::detach`].
    fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, Refusal>;
    /// See [`cuda::Gpu::undo`].
    fn undo(&mut self, link: &mut dyn Link) -> Result<(), String>;
    /// See [`cuda::Gpu::is_detached`].
    fn is_detached(&self) -> bool;
    /// See [`cuda::Gpu::attach`].
    fn attach(&mut self, mirror: Option<Delivered>, link: &mut dyn Link) -> Result<u64, String>;
}

impl Gpu for cuda::Gpu {
    fn activity(&self) -> Activity {
        cuda::activity::look()
    }

    fn mirror_bytes(&mut self) -> u64 {
        self.mirror_bytes()
    }

    fn stage(&mut self, mirror: Delivered) -> Result<(), String> {
        self.stage(mirror)
    }

    fn unstage(&mut self) {
        self.unstage();
    }

    fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, Refusal> {
        self.detach(attempt, timeout, park, link)
    }

    fn undo(&mut self, link: &mut dyn Link) -> Result<(), String> {
        self.undo(link)
    }

    fn is_detached(&self) -> bool {
        self.is_detached()
    }

    fn attach(&mut self, mirror: Option<Delivered>, link: &mut dyn Link) -> Result<u64, String> {
        self.attach(mirror, link)
    }
}

/// A mistake of ours may not end the agent while the state is off the GPU.
fn guarded<T>(step: &str, work: impl FnOnce() -> T) -> Result<T, String> {
    let mistake = |_| format!("the interposer made a mistake when it {step}; please report it");
    catch_unwind(AssertUnwindSafe(work)).map_err(mistake)
}

/// Why an agent ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The main thread ended.
    MainThread,
    /// There is nobody to talk to.
    Silent,
}

/// Why a conversation ended.
#[derive(Debug, PartialEq, Eq)]
enum Hangup {
    /// The launcher is about to dump the process.
    Quiesced { attempt: u64 },
    /// The connection broke.
    Lost,
    /// The launcher does not want us, or says what we do not understand.
    Refused,
}

/// A checkpoint that the agent has gone away for, and has not yet told the launcher that it is back from.
struct Absence {
    attempt: u64,
    /// What came of putting the state back, once that has been tried: how many bytes were copied, or why it is lost.
    returned: Option<Result<u64, String>>,
}

/// The life of an agent.
fn serve(address: &Address, gpu: &mut dyn Gpu) -> End {
    let mut started_ticks = STARTED_TICKS.load(SeqCst);
    let mut away = None;
    let mut search = Search::new(address);
    let first = Socket::noted().filter(|socket| socket.connect(address).is_ok());
    let mut found = first.map(|socket| Found { socket, start_time_ticks: started_ticks });
    loop {
        let Some(found) = found.take().or_else(|| search.run(away.is_some())) else {
            return if MAIN_THREAD_ENDED.load(SeqCst) { End::MainThread } else { End::Silent };
        };
        let hangup = converse(&found, &mut away, &mut started_ticks, gpu);
        // Whatever was prepared was so for this conversation.
        gpu.unstage();
        match hangup {
            Hangup::Quiesced { attempt } => {
                away = Some(Absence { attempt, returned: None });
                search = Search::new(address);
            }
            Hangup::Lost => {}
            Hangup::Refused => return End::Silent,
        }
    }
}

/// A connection, and what the process's start time was after it had been made; 0 if unknown.
struct Found {
    socket: Socket,
    start_time_ticks: u64,
}

/// The search for the launcher. What it spent is not given back when a connection is lost, so that a launcher
/// that fails over and over is not run after for ever.
struct Search<'a> {
    address: &'a Address,
    tries: u32,
    wait: Duration,
}

impl<'a> Search<'a> {
    fn new(address: &'a Address) -> Self {
        Self { address, tries: 0, wait: FIRST_WAIT }
    }

    /// Waits, then looks, until there is a connection. For an agent that is not away: `None` if the main thread has
    /// ended, or after [`MOST_TRIES`].
    fn run(&mut self, is_away: bool) -> Option<Found> {
        loop {
            if !is_away && (MAIN_THREAD_ENDED.load(SeqCst) || self.tries >= MOST_TRIES) {
                return None;
            }
            std::thread::sleep(self.wait);
            self.tries = self.tries.saturating_add(1);
            self.wait =
                if self.tries < PATIENT_AFTER { (self.wait * 2).min(LONGEST_WAIT) } else { PATIENT_WAIT };
            // What is not there is not connected to: a dump could catch the socket that is made for it.
            if self.address.exists()
                && let Ok(socket) = fork::while_none(Socket::open)
                && socket.connect(self.address).is_ok()
            {
                let start_time_ticks = fork::while_none(process::start_time_ticks).unwrap_or(0);
                return Some(Found { socket, start_time_ticks });
            }
        }
    }
}

/// Talks to the launcher until one side has had enough. What `away` holds is taken once it has been told;
/// `started_ticks`, the start time that the launcher knows, is brought up to date then.
fn converse(found: &Found, away: &mut Option<Absence>, started_ticks: &mut u64, gpu: &mut dyn Gpu) -> Hangup {
    let Found { socket, start_time_ticks } = found;
    let mut conversation = Conversation::new(socket);
    // After noting down the socket, before reading: the main thread does these two the other way round.
    if away.is_none() && MAIN_THREAD_ENDED.load(SeqCst) {
        return Hangup::Lost;
    }
    match greet(socket, away.as_ref(), *start_time_ticks, gpu.is_detached()) {
        Ok(ToAgent::Welcome { .. }) => {}
        Ok(_) => return Hangup::Refused,
        Err(hangup) => return hangup,
    }
    if let Some(absence) = away {
        let is_known = *started_ticks != 0 && *start_time_ticks != 0;
        let restored = is_known && started_ticks != start_time_ticks;
        if let Err(hangup) = come_back(socket, &mut conversation, absence, restored, gpu) {
            return hangup;
        }
        *away = None;
        if MAIN_THREAD_ENDED.load(SeqCst) {
            return Hangup::Lost;
        }
    }
    *started_ticks = *start_time_ticks;
    loop {
        let answer = match conversation.hear().map_err(hangup) {
            Ok(ToAgent::Prepare { attempt }) => {
                Some(FromAgent::Needs { attempt, mirror_bytes: gpu.mirror_bytes() })
            }
            Ok(ToAgent::Stage { attempt, mirror, bytes }) => match delivered(socket, mirror, bytes) {
                Ok(mirror) => Some(stage(attempt, mirror, gpu)),
                Err(hangup) => return hangup,
            },
            Ok(ToAgent::Unstage { .. }) => {
                gpu.unstage();
                None
            }
            Ok(ToAgent::Look) => {
                let Activity { calls, is_waiting } = gpu.activity();
                Some(FromAgent::Activity { calls, is_waiting })
            }
            Ok(ToAgent::Quiesce { attempt, timeout_ms, park }) => {
                Some(quiesce(attempt, timeout_ms, park, &mut conversation, gpu))
            }
            Ok(_) => return Hangup::Refused,
            Err(hangup) => return hangup,
        };
        let Some(answer) = answer else { continue };
        match (say(socket, &answer), answer) {
            // Heard or not: the state is off the GPU.
            (_, FromAgent::Quiesced { attempt, .. }) => return Hangup::Quiesced { attempt },
            (Ok(()), _) => {}
            (Err(hangup), _) => return hangup,
        }
    }
}

/// Receives the descriptor that follows.
fn delivered(socket: &Socket, id: u64, bytes: u64) -> Result<Delivered, Hangup> {
    let file = socket.receive(1).ok().and_then(|mut files| files.pop()).ok_or(Hangup::Lost)?;
    Ok(Delivered { id, bytes, file })
}

fn stage(attempt: u64, mirror: Delivered, gpu: &mut dyn Gpu) -> FromAgent {
    match guarded("pinned memory", || gpu.stage(mirror)).flatten() {
        Ok(()) => FromAgent::Staged { attempt },
        Err(reason) => FromAgent::Failed { attempt, reason, is_lost: false },
    }
}

/// Takes the state off the GPU; returns what to answer.
fn quiesce(attempt: u64, timeout_ms: u64, park: bool, link: &mut dyn Link, gpu: &mut dyn Gpu) -> FromAgent {
    let timeout = Duration::from_millis(timeout_ms);
    let detached = guarded("took the GPU's state off", || gpu.detach(attempt, timeout, park, link));
    let detached = detached.unwrap_or_else(|reason| {
        // Nobody knows how far it had come.
        let undone = guarded("put it back again", || gpu.undo(link)).flatten();
        Err(Refusal { is_lost: undone.is_err(), reason })
    });
    match detached {
        Ok(gpu) => FromAgent::Quiesced { attempt, gpu },
        Err(Refusal { reason, is_lost }) => FromAgent::Failed { attempt, reason, is_lost },
    }
}

/// Puts the state back if it is off the GPU, once, and says so.
fn come_back(
    socket: &Socket,
    link: &mut dyn Link,
    absence: &mut Absence,
    restored: bool,
    gpu: &mut dyn Gpu,
) -> Result<(), Hangup> {
    if absence.returned.is_none() {
        absence.returned = Some(if gpu.is_detached() { put_back(socket, link, gpu)? } else { Ok(0) });
    }
    let (copied_bytes, lost) = match &absence.returned {
        Some(Ok(copied_bytes)) => (*copied_bytes, None),
        Some(Err(reason)) => (0, Some(reason.clone())),
        None => (0, None),
    };
    say(socket, &FromAgent::Back { attempt: absence.attempt, restored, copied_bytes, lost })
}

/// What comes of putting the state back with what the launcher delivers. It is not tried before that is here.
fn put_back(socket: &Socket, link: &mut dyn Link, gpu: &mut dyn Gpu) -> Result<Result<u64, String>, Hangup> {
    let ToAgent::Deliver { mirror, bytes, .. } = hear(socket)? else { return Err(Hangup::Lost) };
    let mirror = if bytes > 0 { Some(delivered(socket, mirror, bytes)?) } else { None };
    Ok(guarded("put the GPU's state back", || gpu.attach(mirror, link)).flatten())
}

/// Says hello and waits for the answer.
fn greet(
    socket: &Socket,
    away: Option<&Absence>,
    start_time_ticks: u64,
    is_detached: bool,
) -> Result<ToAgent, Hangup> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        pid: std::process::id(),
        start_time_ticks,
        exe: process::exe(),
        away: away.map(|absence| absence.attempt),
        is_detached,
        tells_activity: true,
    };
    say(socket, &FromAgent::Hello(hello))?;
    hear(socket)
}

fn say(socket: &Socket, message: &FromAgent) -> Result<(), Hangup> {
    link::say(socket, message).map_err(|_| Hangup::Lost)
}

fn hear(socket: &Socket) -> Result<ToAgent, Hangup> {
    link::hear(socket).map_err(hangup)
}

fn hangup(error: FrameError) -> Hangup {
    match error {
        FrameError::NotJson(_) | FrameError::TooLong { .. } => Hangup::Refused,
        _ => Hangup::Lost,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::thread::{self, JoinHandle};

    use ckpt_protocol::{descriptors, frame};

    use super::*;

    /// What was done to the GPU, in its order.
    static DONE: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn note(done: String) {
        DONE.lock().unwrap_or_else(PoisonError::into_inner).push(done);
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
    }

    impl Gpu for Played {
        fn activity(&self) -> Activity {
            Activity { calls: 6, is_waiting: true }
        }

        fn mirror_bytes(&mut self) -> u64 {
            4096
        }

        fn stage(&mut self, mirror: Delivered) -> Result<(), String> {
            note(format!("stage {} {} {}", mirror.id, mirror.bytes, content(mirror.file)));
            if self.kind == Kind::Tainted { Err("no room".to_owned()) } else { Ok(()) }
        }

        fn unstage(&mut self) {
            note("unstage".to_owned());
        }

        fn detach(
            &mut self,
            _attempt: u64,
            timeout: Duration,
            park: bool,
            link: &mut dyn Link,
        ) -> Result<Option<GpuReport>, Refusal> {
            match self.kind {
                Kind::Tainted => return Err(format!("not in {timeout:?}").into()),
                Kind::Mistaken => panic!("a mistake"),
                Kind::Parking | Kind::Late if park => {
                    let files = [file("one"), file("two")];
                    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                    let (answer, _) = link.ask(&FromAgent::Park { count: 2 }, &borrowed).expect("an answer");
                    assert_eq!(answer, ToAgent::Parked { is_kept: true });
                    if self.kind == Kind::Late {
                        return Err("too late".to_owned().into());
                    }
                }
                _ => {}
            }
            note(format!("detach {}", timeout.as_millis()));
            self.is_detached = true;
            Ok(Some(GpuReport { parked_bytes: 7, ..GpuReport::default() }))
        }

        fn undo(&mut self, _: &mut dyn Link) -> Result<(), String> {
            note("undo".to_owned());
            Ok(())
        }

        fn is_detached(&self) -> bool {
            self.is_detached
        }

        fn attach(&mut self, mirror: Option<Delivered>, link: &mut dyn Link) -> Result<u64, String> {
            self.is_detached = false;
            if self.kind == Kind::Lost {
                return Err("GPU state is gone".to_owned());
            }
            note(format!(
                "attach {:?}",
                mirror.map(|mirror| (mirror.id, mirror.bytes, content(mirror.file)))
            ));
            if self.kind == Kind::Parking {
                let (_, files) = link.ask(&FromAgent::Unpark { first: 0, count: 2 }, &[]).expect("an answer");
                note(files.into_iter().map(content).collect());
            }
            Ok(11)
        }
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
            let agent =
                thread::spawn(move || serve(&address(&path), &mut Played { kind, is_detached: false }));
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
        tell(stream, &ToAgent::Quiesce { attempt, timeout_ms: 700, park: true });
    }

    fn goes(stream: &mut UnixStream, attempt: u64) {
        let gpu = Some(GpuReport { parked_bytes: 7, ..GpuReport::default() });
        assert_eq!(hear(stream), FromAgent::Quiesced { attempt, gpu });
    }

    fn deliver(stream: &mut UnixStream, text: &str) {
        let bytes = text.len() as u64;
        tell(stream, &ToAgent::Deliver { mirror: 5, bytes, parked: 0 });
        if bytes > 0 {
            descriptors::send(stream.as_fd(), &[file(text).as_fd()]).expect("sent");
        }
    }

    fn back(attempt: u64) -> FromAgent {
        FromAgent::Back { attempt, restored: false, copied_bytes: 11, lost: None }
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

    #[test]
    fn a_mirror_is_staged_and_let_go_of() {
        let launcher = Launcher::of(Kind::Whole);
        let (mut stream, _) = launcher.welcomes();
        tell(&mut stream, &ToAgent::Prepare { attempt: 3 });
        assert_eq!(hear(&mut stream), FromAgent::Needs { attempt: 3, mirror_bytes: 4096 });
        tell(&mut stream, &ToAgent::Stage { attempt: 3, mirror: 8, bytes: 4 });
        descriptors::send(stream.as_fd(), &[file("mine").as_fd()]).expect("sent");
        assert_eq!(hear(&mut stream), FromAgent::Staged { attempt: 3 });
        tell(&mut stream, &ToAgent::Unstage { attempt: 3 });
        assert_eq!(launcher.ends(stream), ["stage 8 4 mine", "unstage", "unstage"]);
    }

    #[test]
    fn a_mirror_that_cannot_be_staged_is_a_failure() {
        let launcher = Launcher::of(Kind::Tainted);
        let (mut stream, _) = launcher.welcomes();
        tell(&mut stream, &ToAgent::Stage { attempt: 3, mirror: 8, bytes: 4 });
        descriptors::send(stream.as_fd(), &[file("mine").as_fd()]).expect("sent");
        let reason = "no room".to_owned();
        assert_eq!(hear(&mut stream), FromAgent::Failed { attempt: 3, reason, is_lost: false });
        assert_eq!(launcher.ends(stream), ["stage 8 4 mine", "unstage"]);
    }

    #[test]
    fn parked_memory_goes_and_comes_in_the_conversation() {
        let launcher = Launcher::of(Kind::Parking);
        let (mut stream, _) = launcher.welcomes();
        quiesce(&mut stream, 1);
        assert_eq!(hear(&mut stream), FromAgent::Park { count: 2 });
        let parked = descriptors::receive(stream.as_fd(), 2).expect("received");
        tell(&mut stream, &ToAgent::Parked { is_kept: true });
        goes(&mut stream, 1);
        let (mut stream, hello) = launcher.welcomes();
        assert!(hello.is_detached);
        deliver(&mut stream, "");
        assert_eq!(hear(&mut stream), FromAgent::Unpark { first: 0, count: 2 });
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
        assert_eq!(hear(&mut stream), FromAgent::Park { count: 2 });
        tell(&mut stream, &ToAgent::Unstage { attempt: 1 });
        tell(&mut stream, &ToAgent::Look);
        tell(&mut stream, &ToAgent::Prepare { attempt: 2 });
        descriptors::receive(stream.as_fd(), 2).expect("received");
        tell(&mut stream, &ToAgent::Parked { is_kept: true });
        let failed = FromAgent::Failed { attempt: 1, reason: "too late".into(), is_lost: false };
        assert_eq!(hear(&mut stream), failed);
        assert_eq!(hear(&mut stream), FromAgent::Activity { calls: 6, is_waiting: true });
        assert_eq!(hear(&mut stream), FromAgent::Needs { attempt: 2, mirror_bytes: 4096 });
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
        // Time for many looks.
        thread::sleep(LONGEST_WAIT * 4);
        assert_eq!(done(), ["detach 700", "unstage"], "the launcher is not there yet");
        std::fs::rename(&hidden, &path).expect("shown");
        // A connection that breaks before anything is delivered.
        let (broken, hello) = launcher.welcomes();
        assert_eq!((hello.away, hello.is_detached), (Some(1), true));
        drop(broken);
        // One that breaks before the agent has said that it is back.
        let (mut broken, _) = launcher.welcomes();
        deliver(&mut broken, "memory");
        broken.shutdown(std::net::Shutdown::Read).expect("shut");
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
        let lost = Some("GPU state is gone".to_owned());
        assert_eq!(hear(&mut stream), FromAgent::Back { attempt: 4, restored: false, copied_bytes: 0, lost });
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
}
