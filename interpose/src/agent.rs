//! The agent: one thread in each process of the job, which answers the launcher.
//!
//! ```text
//!                                    Quiesce, and the GPU's state cannot be taken off it: Failed
//!                                  +--+
//!              launcher is there   |  v     Quiesce, GPU's state is off, Quiesced
//!   Starting --------------------> Connected ------------------------> Away
//!      ^  |                        ^  |    |                            |
//!      |  | not there,             |  |    | Refused,                   | launcher is there again:
//!      |  | MOST_TRIES             |  |    | not understood             | GPU's state is put back,
//!      |  v                        |  |    v                            | Hello{away}, Back
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

use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, ToAgent};
use ckpt_protocol::frame::{self, FrameError};

use crate::socket::{Address, Socket};
use crate::{cuda, fork, process};

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

static ADDRESS: OnceLock<Address> = OnceLock::new();
/// The start time of the process when its agent was started; 0 where `/proc` cannot be read.
static STARTED_TICKS: AtomicU64 = AtomicU64::new(0);
/// Notices the end of the main thread.
static MAIN_THREAD: OnceLock<libc::pthread_key_t> = OnceLock::new();
static MAIN_THREAD_ENDED: AtomicBool = AtomicBool::new(false);
/// Given up, for this process and its children.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Starts the agent of a process at its very beginning, on the main thread.
pub fn install(address: Address) {
    // An allocator that the job brings along may have fork handlers too, and they have to come before ours,
    // which starts a thread: children run the handlers in the order of their registration. Being asked for
    // memory makes every allocator register them.
    drop(std::hint::black_box(Box::new(0_u8)));
    if ADDRESS.set(address).is_err() || !fork::install() {
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
pub fn restart_in_child() {
    cuda::after_fork_in_child();
    // The parent's connection. The agent that it belonged to was not copied.
    drop(Socket::noted());
    MAIN_THREAD_ENDED.store(false, SeqCst);
    if !SILENT.load(SeqCst) {
        start();
    }
}

/// Starts the agent's thread. The calling thread is the process's only one, so this is the place for what
/// takes descriptors: nobody can be counting on the number that comes next. (After a checkpoint it cannot be
/// helped that the agent has a low number for some microseconds, in which an application that closes a number
/// to get the same one again would be disappointed.)
fn start() {
    let (Some(address), Some(&key)) = (ADDRESS.get(), MAIN_THREAD.get()) else { return };
    // Any value but null, so that the key's destructor runs for this thread.
    // SAFETY: the key was created and is never deleted; the value is never read through.
    if unsafe { libc::pthread_setspecific(key, (&raw const ADDRESS).cast()) } != 0 {
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
    let life = || ADDRESS.get().map_or(End::Silent, |address| serve(address, &CUDA));
    if !catch_unwind(life).is_ok_and(|end| end == End::MainThread) {
        SILENT.store(true, SeqCst);
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
struct Gpu {
    /// Takes it off, within a time; why it cannot be taken off, in words for people. Nothing has changed then.
    detach: fn(Duration) -> Result<(), String>,
    /// Puts it back; why it is lost.
    attach: fn() -> Result<(), String>,
}

const CUDA: Gpu = Gpu { detach: cuda::detach, attach: cuda::attach };

/// A mistake of ours may not end the agent while the state is off the GPU.
fn guarded(step: &str, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let mistake = |_| Err(format!("the interposer made a mistake when it {step}; please report it"));
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(mistake)
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
    /// The state is off the GPU.
    is_detached: bool,
    /// Why it could not be put back.
    lost: Option<String>,
}

impl Absence {
    /// Puts the state back that is off the GPU, once.
    fn end(&mut self, gpu: &Gpu) {
        if std::mem::take(&mut self.is_detached) {
            self.lost = guarded("put the GPU's state back", gpu.attach).err();
        }
    }
}

/// The life of an agent.
fn serve(address: &Address, gpu: &Gpu) -> End {
    let mut started_ticks = STARTED_TICKS.load(SeqCst);
    let mut away = None;
    let mut search = Search::new(address);
    let first = Socket::noted().filter(|socket| socket.connect(address).is_ok());
    let mut found = first.map(|socket| Found { socket, start_time_ticks: started_ticks });
    loop {
        let Some(found) = found.take().or_else(|| search.run(away.as_mut(), gpu)) else {
            return if MAIN_THREAD_ENDED.load(SeqCst) { End::MainThread } else { End::Silent };
        };
        match converse(&found, &mut away, &mut started_ticks, gpu) {
            Hangup::Quiesced { attempt } => {
                away = Some(Absence { attempt, is_detached: true, lost: None });
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

    /// Waits, then looks, until there is a connection; an absence ends before that. For an agent that is not
    /// away: `None` if the main thread has ended, or after [`MOST_TRIES`].
    fn run(&mut self, mut away: Option<&mut Absence>, gpu: &Gpu) -> Option<Found> {
        loop {
            if away.is_none() && (MAIN_THREAD_ENDED.load(SeqCst) || self.tries >= MOST_TRIES) {
                return None;
            }
            std::thread::sleep(self.wait);
            self.tries = self.tries.saturating_add(1);
            self.wait =
                if self.tries < PATIENT_AFTER { (self.wait * 2).min(LONGEST_WAIT) } else { PATIENT_WAIT };
            if let Some(absence) = &mut away
                && self.address.exists()
            {
                // May take long, which no limit of a conversation may run out over.
                absence.end(gpu);
            }
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
fn converse(found: &Found, away: &mut Option<Absence>, started_ticks: &mut u64, gpu: &Gpu) -> Hangup {
    let Found { socket, start_time_ticks } = found;
    // After noting down the socket, before reading: the main thread does these two the other way round.
    if away.is_none() && MAIN_THREAD_ENDED.load(SeqCst) {
        return Hangup::Lost;
    }
    match greet(socket, away.as_ref().map(|absence| absence.attempt), *start_time_ticks) {
        Ok(ToAgent::Welcome { .. }) => {}
        Ok(_) => return Hangup::Refused,
        Err(hangup) => return hangup,
    }
    if let Some(Absence { attempt, lost, .. }) = away {
        let is_known = *started_ticks != 0 && *start_time_ticks != 0;
        let restored = is_known && started_ticks != start_time_ticks;
        let back = FromAgent::Back { attempt: *attempt, restored, copied_bytes: 0, lost: lost.clone() };
        if let Err(hangup) = say(socket, &back) {
            return hangup;
        }
        *away = None;
        if MAIN_THREAD_ENDED.load(SeqCst) {
            return Hangup::Lost;
        }
    }
    *started_ticks = *start_time_ticks;
    loop {
        let answer = match hear(socket) {
            Ok(ToAgent::Quiesce { attempt, timeout_ms, .. }) => quiesce(attempt, timeout_ms, gpu),
            Ok(_) => return Hangup::Refused,
            Err(hangup) => return hangup,
        };
        match (say(socket, &answer), answer) {
            // Heard or not: the state is off the GPU.
            (_, FromAgent::Quiesced { attempt, .. }) => return Hangup::Quiesced { attempt },
            (Ok(()), _) => {}
            (Err(hangup), _) => return hangup,
        }
    }
}

/// Takes the state off the GPU; returns what to answer.
fn quiesce(attempt: u64, timeout_ms: u64, gpu: &Gpu) -> FromAgent {
    let detached = guarded("took the GPU's state off", || (gpu.detach)(Duration::from_millis(timeout_ms)));
    match detached {
        Ok(()) => FromAgent::Quiesced { attempt, gpu: None },
        Err(reason) => FromAgent::Failed { attempt, reason },
    }
}

/// Says hello and waits for the answer.
fn greet(socket: &Socket, away: Option<u64>, start_time_ticks: u64) -> Result<ToAgent, Hangup> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        pid: std::process::id(),
        start_time_ticks,
        exe: process::exe(),
        away,
        is_detached: false,
    };
    say(socket, &FromAgent::Hello(hello))?;
    hear(socket)
}

fn say(mut socket: &Socket, message: &FromAgent) -> Result<(), Hangup> {
    frame::write(&mut socket, message).map_err(|_| Hangup::Lost)
}

fn hear(mut socket: &Socket) -> Result<ToAgent, Hangup> {
    frame::read(&mut socket).map_err(|error| match error {
        FrameError::NotJson(_) | FrameError::TooLong { .. } => Hangup::Refused,
        _ => Hangup::Lost,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::thread::{self, JoinHandle};

    use super::*;

    /// What was done to the GPU, in its order.
    static DONE: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn note(done: String) {
        DONE.lock().unwrap_or_else(PoisonError::into_inner).push(done);
    }

    fn done() -> Vec<String> {
        std::mem::take(&mut *DONE.lock().unwrap_or_else(PoisonError::into_inner))
    }

    const WHOLE: Gpu = Gpu {
        detach: |timeout| {
            note(format!("detach {}", timeout.as_millis()));
            Ok(())
        },
        attach: || {
            note("attach".to_owned());
            Ok(())
        },
    };
    /// Gives its time as the reason.
    const TAINTED: Gpu = Gpu { detach: |timeout| Err(format!("not in {timeout:?}")), ..WHOLE };
    const LOST: Gpu = Gpu { attach: || Err("GPU state is gone".to_owned()), ..WHOLE };
    const MISTAKEN: Gpu = Gpu { detach: |_| panic!("a mistake"), ..WHOLE };

    struct Launcher {
        listener: UnixListener,
        agent: JoinHandle<End>,
        directory: tempfile::TempDir,
        _turn: MutexGuard<'static, ()>,
    }

    impl Launcher {
        fn of(gpu: &'static Gpu) -> Self {
            let turn = crate::socket::tests::turn();
            done();
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("agents");
            let listener = UnixListener::bind(&path).expect("listening");
            let agent = thread::spawn(move || serve(&address(&path), gpu));
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
        tell(stream, &ToAgent::Quiesce { attempt, timeout_ms: 700, park: false });
    }

    #[test]
    fn what_cannot_be_taken_off_the_gpu_is_said_and_the_agent_stays() {
        let launcher = Launcher::of(&TAINTED);
        let (mut stream, _) = launcher.welcomes();
        for attempt in [1, 2] {
            quiesce(&mut stream, attempt);
            let reason = "not in 700ms".to_owned();
            assert_eq!(hear(&mut stream), FromAgent::Failed { attempt, reason });
        }
        assert_eq!(launcher.ends(stream), [""; 0]);
    }

    #[test]
    fn a_mistake_is_a_reason_too() {
        let launcher = Launcher::of(&MISTAKEN);
        let (mut stream, _) = launcher.welcomes();
        quiesce(&mut stream, 1);
        let FromAgent::Failed { attempt: 1, reason } = hear(&mut stream) else { panic!("not a failure") };
        assert!(reason.contains("mistake"), "{reason}");
        launcher.ends(stream);
    }

    #[test]
    fn the_gpus_state_is_back_before_the_agent_is_and_once_only() {
        let launcher = Launcher::of(&WHOLE);
        let (mut stream, _) = launcher.welcomes();
        let path = launcher.directory.path().join("agents");
        let hidden = launcher.directory.path().join("hidden");
        std::fs::rename(&path, &hidden).expect("hidden");
        quiesce(&mut stream, 1);
        assert_eq!(hear(&mut stream), FromAgent::Quiesced { attempt: 1, gpu: None });
        assert!(frame::read::<FromAgent>(&mut stream).is_err(), "it has gone away");
        // Time for many looks.
        thread::sleep(LONGEST_WAIT * 4);
        assert_eq!(done(), ["detach 700"], "the launcher is not there yet");
        std::fs::rename(&hidden, &path).expect("shown");
        // A connection that breaks before the agent has said that it is back.
        let (broken, _) = launcher.listener.accept().expect("an agent");
        assert_eq!(done(), ["attach"]);
        drop(broken);
        let (mut stream, hello) = launcher.welcomes();
        assert_eq!(hello.away, Some(1));
        assert_eq!(
            hear(&mut stream),
            FromAgent::Back { attempt: 1, restored: false, copied_bytes: 0, lost: None }
        );
        assert_eq!(launcher.ends(stream), [""; 0]);
    }

    #[test]
    fn state_that_is_lost_is_told() {
        let launcher = Launcher::of(&LOST);
        let (mut stream, _) = launcher.welcomes();
        quiesce(&mut stream, 4);
        assert_eq!(hear(&mut stream), FromAgent::Quiesced { attempt: 4, gpu: None });
        let (mut stream, _) = launcher.welcomes();
        let lost = Some("GPU state is gone".to_owned());
        assert_eq!(hear(&mut stream), FromAgent::Back { attempt: 4, restored: false, copied_bytes: 0, lost });
        launcher.ends(stream);
    }

    #[test]
    fn a_farewell_that_nobody_hears_is_an_absence_all_the_same() {
        let launcher = Launcher::of(&WHOLE);
        let (mut stream, _) = launcher.welcomes();
        // The agent can read from now on, but not write.
        stream.shutdown(std::net::Shutdown::Read).expect("shut");
        quiesce(&mut stream, 9);
        let (mut stream, hello) = launcher.welcomes();
        assert_eq!(hello.away, Some(9));
        assert_eq!(
            hear(&mut stream),
            FromAgent::Back { attempt: 9, restored: false, copied_bytes: 0, lost: None }
        );
        assert_eq!(launcher.ends(stream), ["detach 700", "attach"]);
    }
}
