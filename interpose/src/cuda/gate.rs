//! The gate: calls that submit work or change the device's state pass it, and wait while it is closed.
//!
//! ```text
//!        close: no call begins,            all calls have left
//!   Open ---------------------> Closing -----------------------> Closed
//!    ^                             |                               |
//!    |       deadline              |             open              |
//!    +-----------------------------+-------------------------------+
//! ```
//!
//! Passing an open gate takes no atomic read-modify-write, no lock and no system call: each thread marks itself as
//! inside in a slot of its own and reads the gate's word. The thread that closes the gate pays for the ordering of
//! the two: membarrier(2) makes every thread of the process pass a full barrier. Without membarrier, every passage
//! needs a fence.
//!
//! A call that is made from inside another one passes a closed gate: closing waits for the outer one.
//!
//! The slots also serve the hang detection ([`tally`]): each counts the calls of its thread. A thread that waits for
//! the GPU is marked in its slot too, and passes no gate.

mod protocol;

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{self, Acquire, Relaxed, Release, SeqCst},
    compiler_fence, fence,
};
use std::time::{Duration, Instant};

use super::cold_call::cold_call;
use super::thread_word::thread_word;
use protocol::{BEGUN, BUSY, CLOSED, INSIDE, SlotState, WAITING, Word};

/// There is no membarrier: each passage needs a fence.
const FENCED: u32 = 2;

/// The gate's word, on which closed-out threads sleep.
pub(super) static GATE: AtomicU32 = AtomicU32::new(0);

/// What [`enter`] adds to the thread's place, and what is subtracted on the way out.
pub(super) const ENTERED: u64 = BEGUN | INSIDE;
pub(super) const INSIDE_ONCE: u64 = INSIDE;

/// The polling interval for the end of the calls that are inside.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A thread's slot.
#[repr(C)]
struct Slot {
    /// See [`protocol`]. It comes first: `launch` has the slot's address only.
    place: AtomicU64,
    is_taken: AtomicBool,
}

const CHUNK: usize = 64;

/// Slots are never freed: the thread that closes the gate reads them without a lock.
struct Chunk {
    slots: [Slot; CHUNK],
    next: AtomicPtr<Chunk>,
}

static FIRST: Chunk = Chunk::new();

impl Chunk {
    const fn new() -> Self {
        let slots = [const { Slot { place: AtomicU64::new(0), is_taken: AtomicBool::new(false) } }; CHUNK];
        Self { slots, next: AtomicPtr::new(null_mut()) }
    }
}

thread_word!(
    /// Each thread's slot; null while it has none.
    slot_of_thread,
    "ckpt_gate_slot"
);

/// The calling thread's slot.
#[inline(always)]
fn current_slot() -> *const Slot {
    slot_of_thread::get() as *const Slot
}

fn remember_slot(slot: *const Slot) {
    slot_of_thread::set(slot as usize);
}

/// Gives a thread's slot back when the thread ends.
static THREAD_ENDS: OnceLock<libc::pthread_key_t> = OnceLock::new();

/// Proof that the thread's place has `WHAT`.
pub(super) struct Noted<const WHAT: u64> {
    slot: &'static Slot,
}

/// Proof that the thread is inside.
pub(super) type Inside = Noted<INSIDE>;

impl<const WHAT: u64> Drop for Noted<WHAT> {
    #[inline]
    fn drop(&mut self) {
        // Other threads write to it only while the thread is outside.
        self.slot.place.store(self.slot.place.load(Relaxed).wrapping_sub(WHAT), Release);
    }
}

/// Notes in the thread's place that it has begun `WHAT`, and counts it by `COUNTED`.
#[inline(always)]
fn note<const WHAT: u64, const COUNTED: u64>() -> Noted<WHAT> {
    let mut slot = current_slot();
    if slot.is_null() {
        slot = cold_call!(take_slot, slot, *const Slot);
    }
    // SAFETY: what is noted or taken is a slot of a chunk, and chunks are never freed.
    let slot = unsafe { &*slot };
    // Other threads write to it only while the thread is outside.
    slot.place.store(slot.place.load(Relaxed).wrapping_add(COUNTED | WHAT), Relaxed);
    Noted { slot }
}

#[inline(always)]
fn enter_with<const WHAT: u64, const COUNTED: u64>() -> Noted<WHAT> {
    let noted = note::<WHAT, COUNTED>();
    // The processor's part is membarrier's, or the fence in `wait_at_the_gate`.
    compiler_fence(SeqCst);
    // Acquire: calls that enter later see what was done while the gate was closed.
    if GATE.load(Acquire) != 0 {
        cold_call!(wait_at_the_gate, &raw const *noted.slot, *const Slot);
    }
    noted
}

/// Enters; waits while the gate is closed.
#[inline(always)]
pub(super) fn enter() -> Inside {
    enter_with::<INSIDE, BEGUN>()
}

/// Enters with a call that may compute for long on the CPU, as one that compiles a module. Such a call does not count
/// as waiting for the GPU.
#[inline(always)]
pub(super) fn enter_busy() -> Noted<{ INSIDE | BUSY }> {
    enter_with::<{ INSIDE | BUSY }, BEGUN>()
}

/// Enters unseen by the hang detection: what a monitor asks is no progress of the program, and no wait.
#[inline(always)]
pub(super) fn enter_unseen() -> Noted<{ INSIDE | BUSY }> {
    enter_with::<{ INSIDE | BUSY }, 0>()
}

/// Notes that the thread waits for the GPU. It is not inside: the gate may close meanwhile.
#[inline(always)]
pub(super) fn wait_for_gpu() -> Noted<WAITING> {
    note::<WAITING, BEGUN>()
}

/// What the program's threads do with the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tally {
    /// The number of calls that entered or began to wait. It only grows, except at an overflow.
    pub(super) begun: u64,
    /// Whether a thread waits for the GPU. If no call has begun since the previous tally, it has waited since then.
    pub(super) is_waiting: bool,
}

/// Counts the calls of the program's threads.
pub(super) fn tally() -> Tally {
    let places = chunks().flat_map(|chunk| &chunk.slots).map(|slot| slot.place.load(Acquire));
    places.fold(Tally { begun: 0, is_waiting: false }, |tally, place| Tally {
        begun: tally.begun.wrapping_add(protocol::begun(place)),
        is_waiting: tally.is_waiting || protocol::is_waiting(place),
    })
}

/// Leaves the gate during a call, to wait for something that may need the gate closed, and enters again. State that
/// was read before may have changed. A nested call stays inside.
pub(super) fn outside<T>(work: impl FnOnce() -> T) -> T {
    struct BackIn {
        place: &'static AtomicU64,
        within: u64,
    }
    impl Drop for BackIn {
        fn drop(&mut self) {
            let inside = enter();
            // The call leaves the gate by its own `Noted`.
            self.place.store(self.within, Relaxed);
            std::mem::forget(inside);
        }
    }
    // SAFETY: what is noted is null or a slot of a chunk, and chunks are never freed.
    let place = unsafe { current_slot().as_ref() }.map(|slot| &slot.place);
    match place.map(|place| (place, place.load(Relaxed))) {
        Some((place, within)) if protocol::depth(within) == 1 => {
            place.store(protocol::out(within), Release);
            let _back_in = BackIn { place, within };
            work()
        }
        _ => work(),
    }
}

/// The gate is closed, or there is no membarrier. Returns the slot.
extern "C" fn wait_at_the_gate(slot: *const Slot) -> *const Slot {
    // SAFETY: `enter` passes the thread's slot.
    let place = unsafe { &(*slot).place };
    if protocol::depth(place.load(Relaxed)) > 1 {
        // Closing waits for the outer call.
        return slot;
    }
    protocol::wait(&GATE, place);
    slot
}

impl SlotState for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// The gate's word, on which threads sleep.
impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn set(&self, bit: u32) {
        self.fetch_or(bit, SeqCst);
    }

    fn clear(&self, bit: u32) {
        self.fetch_and(!bit, SeqCst);
    }

    fn fence(&self) {
        fence(SeqCst);
    }

    /// May wake early.
    fn sleep_while(&self, word: u32) {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: futex(2) with FUTEX_WAIT reads the word, which lives as long as `self`; NULL: no time limit.
        unsafe { libc::syscall(libc::SYS_futex, self.as_ptr(), operation, word, null::<libc::timespec>()) };
    }

    fn wake_all(&self) {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: futex(2) with FUTEX_WAKE only wakes threads that wait at the address.
        unsafe { libc::syscall(libc::SYS_futex, self.as_ptr(), operation, i32::MAX) };
    }
}

/// Prepares the gate: before the first call that may pass it.
pub(super) fn prepare() {
    if membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0 {
        GATE.fetch_or(FENCED, SeqCst);
    }
    let mut key = 0;
    // SAFETY: `key` is writable; the destructor is a function of this library, which stays mapped.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(thread_ends)) } == 0 {
        // Without a key, slots of ended threads are not reused, which only costs their memory.
        let _ = THREAD_ENDS.set(key);
    }
}

fn membarrier(command: i32) -> i64 {
    // SAFETY: membarrier(2) takes plain numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}

/// Closes the gate and waits until every call has left. At the deadline it opens again.
///
/// # Errors
/// How many threads were still inside.
pub(super) fn close(deadline: Instant) -> Result<(), usize> {
    protocol::shut(&GATE);
    // A process that was restored from a dump may have lost its registration.
    if GATE.load(SeqCst) & FENCED == 0
        && membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0
        && (membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0
            || membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0)
    {
        open();
        return Err(0);
    }
    loop {
        let inside = count_inside();
        if inside == 0 {
            return Ok(());
        }
        if Instant::now() >= deadline {
            open();
            return Err(inside);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Opens the gate.
pub(super) fn open() {
    protocol::open(&GATE);
}

fn count_inside() -> usize {
    chunks().flat_map(|chunk| &chunk.slots).filter(|slot| protocol::is_inside(&slot.place)).count()
}

fn chunks() -> impl Iterator<Item = &'static Chunk> {
    std::iter::successors(Some(&FIRST), |chunk| {
        // SAFETY: what is linked is a chunk that was leaked in `take_slot`.
        unsafe { chunk.next.load(Acquire).as_ref() }
    })
}

/// Takes a slot for the calling thread, which has none yet.
extern "C" fn take_slot(_none: *const Slot) -> *const Slot {
    let is_free = |slot: &&Slot| slot.is_taken.compare_exchange(false, true, SeqCst, Relaxed).is_ok();
    let slot = loop {
        if let Some(slot) = chunks().flat_map(|chunk| &chunk.slots).find(is_free) {
            break slot;
        }
        let fresh = Box::into_raw(Box::new(Chunk::new()));
        let last = chunks().last().unwrap_or(&FIRST);
        if last.next.compare_exchange(null_mut(), fresh, SeqCst, Relaxed).is_err() {
            // Another thread was faster.
            // SAFETY: it was made above and no other thread has seen it.
            drop(unsafe { Box::from_raw(fresh) });
        }
    };
    remember_slot(slot);
    if let Some(key) = THREAD_ENDS.get() {
        // SAFETY: the key was created and is never deleted.
        unsafe { libc::pthread_setspecific(*key, (&raw const *slot).cast()) };
    }
    slot
}

extern "C" fn thread_ends(slot: *mut c_void) {
    // A destructor that runs after this one may call the driver again: it then takes another slot.
    remember_slot(null());
    // SAFETY: the value is the thread's slot, see `take_slot`.
    let slot = unsafe { &*slot.cast::<Slot>() };
    slot.is_taken.store(false, SeqCst);
}

/// In the child of a fork: the threads that were inside do not exist, and the gate is open.
pub(super) fn after_fork_in_child() {
    for slot in chunks().flat_map(|chunk| &chunk.slots) {
        slot.place.store(0, Relaxed);
    }
    GATE.fetch_and(!CLOSED, SeqCst);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    /// There is one gate per process, so tests take turns.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        prepare();
        turn
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(300)
    }

    #[test]
    fn a_closed_gate_keeps_calls_out_until_it_opens() {
        let _turn = turn();
        close(soon()).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let caller = std::thread::spawn(move || {
            let _inside = enter();
            sender.send(()).unwrap();
        });
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
        open();
        receiver.recv_timeout(Duration::from_secs(300)).unwrap();
        caller.join().unwrap();
    }

    #[test]
    fn a_call_that_stays_inside_opens_the_gate_at_the_deadline() {
        let _turn = turn();
        let inside = enter();
        assert_eq!(close(Instant::now() + Duration::from_millis(20)), Err(1));
        drop(inside);
        close(soon()).unwrap();
        open();
    }

    #[test]
    fn a_call_from_inside_a_call_passes_a_closing_gate() {
        let _turn = turn();
        let outer = enter();
        let closer = std::thread::spawn(|| close(soon()));
        while GATE.load(SeqCst) & CLOSED == 0 {
            std::thread::yield_now();
        }
        drop(enter());
        drop(outer);
        closer.join().unwrap().unwrap();
        open();
    }

    #[test]
    fn a_call_that_waits_outside_lets_the_gate_close_and_comes_back_in_when_it_opens() {
        let _turn = turn();
        let (closed, is_closed) = std::sync::mpsc::channel();
        let (back, is_back) = std::sync::mpsc::channel();
        let (out, is_out) = std::sync::mpsc::channel();
        let caller = std::thread::spawn(move || {
            let inside = enter();
            outside(|| {
                out.send(()).unwrap();
                is_closed.recv().unwrap();
            });
            back.send(()).unwrap();
            inside
        });
        is_out.recv().unwrap();
        close(soon()).unwrap();
        closed.send(()).unwrap();
        assert!(is_back.recv_timeout(Duration::from_millis(50)).is_err());
        open();
        is_back.recv_timeout(Duration::from_secs(300)).unwrap();
        caller.join().unwrap();
    }

    #[test]
    fn a_call_from_inside_a_call_does_not_go_outside() {
        let _turn = turn();
        let outer = enter();
        let inner = enter();
        outside(|| assert_eq!(close(Instant::now() + Duration::from_millis(20)), Err(1)));
        drop(inner);
        outside(|| {
            close(soon()).unwrap();
            open();
        });
        drop(outer);
    }

    #[test]
    fn nobody_is_inside_a_closed_gate_however_many_try() {
        let _turn = turn();
        static INSIDE: AtomicU64 = AtomicU64::new(0);
        static PASSED: AtomicU64 = AtomicU64::new(0);
        static STOP: AtomicBool = AtomicBool::new(false);
        let callers: Vec<_> = (0..32)
            .map(|_| {
                std::thread::spawn(|| {
                    while !STOP.load(SeqCst) {
                        let _inside = enter();
                        INSIDE.fetch_add(1, SeqCst);
                        PASSED.fetch_add(1, SeqCst);
                        INSIDE.fetch_sub(1, SeqCst);
                    }
                })
            })
            .collect();
        for _ in 0..50 {
            close(soon()).unwrap();
            let passed = PASSED.load(SeqCst);
            for _ in 0..100 {
                assert_eq!(INSIDE.load(SeqCst), 0);
                std::hint::spin_loop();
            }
            assert_eq!(PASSED.load(SeqCst), passed);
            open();
            // None of them sleeps on for ever.
            let deadline = soon();
            while PASSED.load(SeqCst) < passed + 32 {
                assert!(Instant::now() < deadline, "a thread was not woken");
                std::thread::yield_now();
            }
        }
        STOP.store(true, SeqCst);
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    }

    #[test]
    fn what_has_begun_is_counted_and_who_waits_is_seen() {
        let _turn = turn();
        let still = |what: &str, is_waiting| {
            let first = tally();
            assert_eq!(first.is_waiting, is_waiting, "{what}");
            assert_eq!(tally(), first, "{what}");
            first.begun
        };
        let at_first = still("nothing", false);
        let inside = enter();
        assert_eq!(still("a call that submits", true), at_first + 1);
        drop(inside);
        drop(enter());
        assert_eq!(still("another one, over", false), at_first + 2);
        let compiling = enter_busy();
        let within = enter();
        assert_eq!(still("a call from inside one that compiles", false), at_first + 4);
        drop(within);
        outside(|| assert_eq!(still("a call that is outside", false), at_first + 4));
        drop(compiling);
        let waiting = wait_for_gpu();
        assert_eq!(still("a wait", true), at_first + 5);
        close(soon()).unwrap();
        assert_eq!(still("a wait before a closed gate", true), at_first + 5);
        open();
        drop(waiting);
        // What waits at the gate does not wait for the GPU, and has begun.
        close(soon()).unwrap();
        let caller = std::thread::spawn(|| drop(enter_busy()));
        while tally().begun == at_first + 5 {
            std::thread::yield_now();
        }
        open();
        caller.join().unwrap();
        assert_eq!(still("all is over", false), at_first + 6);
    }

    #[test]
    fn slots_of_ended_threads_are_used_again() {
        let _turn = turn();
        for _ in 0..CHUNK * 4 {
            std::thread::spawn(|| drop(enter())).join().unwrap();
        }
        let chunks = chunks().count();
        assert!(chunks <= 3, "{chunks} chunks");
    }
}
