//! The agent: one thread in each process of the job, which answers the launcher.
//!
//! ```text
//!              launcher is there                   Quiesce, Quiesced
//!   Starting --------------------> Connected ------------------------> Away
//!      ^  |                        ^  |    |                            |
//!      |  | not there,             |  |    | Refused,                   | launcher is there again:
//!      |  | MOST_TRIES             |  |    | not understood             | Hello{away}, Back
//!      |  v                        |  |    v                            |
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
//! A forked child starts over with an agent of its own. Silent is for ever, in children too.
//!
//! A process whose main thread ends by `pthread_exit` ends when its last thread does, which must not be the
//! agent: it leaves as soon as the main thread has.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::panic::catch_unwind;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, ToAgent};
use ckpt_protocol::frame::{self, FrameError};

use crate::socket::{Address, Socket};
use crate::{fork, process};

/// How long to wait between two looks for the launcher, first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// How many looks a launcher is given that was never there or was lost: about a minute. A process can be
/// started while the launcher prepares a dump, so this has to outlast that.
const MOST_TRIES: u32 = 1200;
/// What an agent that is away waits for later on, when it is clear that the launcher takes its time.
const PATIENT_AFTER: u32 = 1200;
const PATIENT_WAIT: Duration = Duration::from_millis(500);

/// Plenty for JSON; what the process does not touch costs nothing.
const STACK_BYTES: usize = 512 * 1024;

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
    if !catch_unwind(serve).is_ok_and(|end| end == End::MainThread) {
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

/// The life of an agent.
fn serve() -> End {
    let Some(address) = ADDRESS.get() else { return End::Silent };
    let mut started_ticks = STARTED_TICKS.load(SeqCst);
    let mut away = None;
    let mut search = Search::new(address);
    let first = Socket::noted().filter(|socket| socket.connect(address).is_ok());
    let mut found = first.map(|socket| Found { socket, start_time_ticks: started_ticks });
    loop {
        let Some(found) = found.take().or_else(|| search.run(away.is_some())) else {
            return if MAIN_THREAD_ENDED.load(SeqCst) { End::MainThread } else { End::Silent };
        };
        match converse(&found, &mut away, &mut started_ticks) {
            Hangup::Quiesced { attempt } => {
                away = Some(attempt);
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

    /// Waits, then looks, until there is a connection. `None` if the main thread has ended, or after
    /// [`MOST_TRIES`] if the launcher did not say that it would be back.
    fn run(&mut self, is_expected: bool) -> Option<Found> {
        loop {
            if MAIN_THREAD_ENDED.load(SeqCst) || (!is_expected && self.tries >= MOST_TRIES) {
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
fn converse(found: &Found, away: &mut Option<u64>, started_ticks: &mut u64) -> Hangup {
    let Found { socket, start_time_ticks } = found;
    // After noting down the socket, before reading: the main thread does these two the other way round.
    if MAIN_THREAD_ENDED.load(SeqCst) {
        return Hangup::Lost;
    }
    match greet(socket, *away, *start_time_ticks) {
        Ok(ToAgent::Welcome { .. }) => {}
        Ok(_) => return Hangup::Refused,
        Err(hangup) => return hangup,
    }
    if let Some(attempt) = *away {
        let is_known = *started_ticks != 0 && *start_time_ticks != 0;
        let restored = is_known && started_ticks != start_time_ticks;
        if let Err(hangup) = say(socket, &FromAgent::Back { attempt, restored }) {
            return hangup;
        }
        *away = None;
    }
    *started_ticks = *start_time_ticks;
    match hear(socket) {
        Ok(ToAgent::Quiesce { attempt }) => match say(socket, &FromAgent::Quiesced { attempt }) {
            Ok(()) => Hangup::Quiesced { attempt },
            Err(hangup) => hangup,
        },
        Ok(_) => Hangup::Refused,
        Err(hangup) => hangup,
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
