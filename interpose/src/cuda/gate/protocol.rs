//! The synchronisation protocol of the gate, independent of its implementation: the model below runs this code.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};

/// The bit of the gate's word that keeps calls out.
pub(super) const CLOSED: u32 = 1;

// What a thread's place counts, in one number that is written by that thread alone while others read it: what it is in
// at the moment, and above that all that it has ever begun. So counting what has begun takes no instruction of its own.

/// A call in which the thread is.
pub(super) const INSIDE: u64 = 1;
/// One of them that may compute for long by itself.
pub(super) const BUSY: u64 = 1 << 8;
/// A wait for the GPU, which the gate does not keep out.
pub(super) const WAITING: u64 = 1 << 16;
/// Any of these that has begun. What comes here is added in an instruction: it has to be below 2^31.
pub(super) const BEGUN: u64 = 1 << 24;

/// The bits of a field of 8.
const FIELD: u64 = 0xFF;
/// What is there of a thread only while the gate is open.
const PASSING: u64 = FIELD * (INSIDE | BUSY);

/// A thread's slot.
pub(super) trait SlotState {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
}

/// The gate's word.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn set(&self, bit: u32);
    fn clear(&self, bit: u32);
    /// A sequentially consistent fence.
    fn fence(&self);
    /// Sleeps if the word still is `word`, until it is woken.
    fn sleep_while(&self, word: u32);
    fn wake_all(&self);
}

/// A thread that has written to its place that it is inside, and found something in the gate's word, waits until
/// it may be.
pub(super) fn wait(gate: &impl Word, place: &impl SlotState) {
    let within = place.load(Relaxed);
    loop {
        gate.fence();
        let word = gate.load(SeqCst);
        if word & CLOSED == 0 {
            return;
        }
        place.store(out(within), Release);
        gate.sleep_while(word);
        place.store(within, Relaxed);
    }
}

/// A place of which the thread has gone out.
pub(super) fn out(within: u64) -> u64 {
    within & !PASSING
}

/// From now on no call begins. Before places are looked at, every thread has to have passed a fence.
pub(super) fn shut(gate: &impl Word) {
    gate.set(CLOSED);
    gate.fence();
}

/// In how many calls a thread is: several if one is made from inside another.
pub(super) fn depth(place: u64) -> u64 {
    place & FIELD
}

/// Whether a thread is inside.
pub(super) fn is_inside(place: &impl SlotState) -> bool {
    depth(place.load(Acquire)) != 0
}

/// Whether a thread waits for the GPU, as far as its calls tell: in a call that waits, or in one that submits work and
/// returns at once unless there is no room for more.
pub(super) fn is_waiting(place: u64) -> bool {
    let has = |what: u64| place & (FIELD * what) != 0;
    has(WAITING) || has(INSIDE) && !has(BUSY)
}

/// How much a thread has begun.
pub(super) fn begun(place: u64) -> u64 {
    place / BEGUN
}

/// Opens the gate for all threads.
pub(super) fn open(gate: &impl Word) {
    gate.clear(CLOSED);
    gate.wake_all();
}

/// Every way in which the threads can run, and every value that the memory model lets them read.
///
/// The fence between a passing thread's write and its read of the gate stands for the closer's membarrier(2), which
/// makes every thread pass one at some point of its own: the model cannot have a fence that another thread inserts.
/// So it leaves out a thread that is between its write and its read when the membarrier comes; that it then looks at
/// the gate later than the gate was shut, or has its write seen, is what membarrier(2) promises. Left out as well:
/// calls inside calls, deadlines, and slots that change hands.
#[cfg(test)]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    struct Thread {
        place: AtomicU64,
        /// What a call does: written by who is inside, read by who has closed. Loom objects to both at once.
        work: UnsafeCell<u32>,
    }

    struct Model {
        word: AtomicU32,
        bed: Mutex<()>,
        woken: Condvar,
        threads: [Thread; 2],
    }

    impl SlotState for AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            self.load(order)
        }
        fn store(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }
    }

    /// As futex(2): the word is compared under a lock that who wakes takes too.
    impl Word for Model {
        fn load(&self, order: Ordering) -> u32 {
            self.word.load(order)
        }
        fn set(&self, bit: u32) {
            self.word.fetch_or(bit, SeqCst);
        }
        fn clear(&self, bit: u32) {
            self.word.fetch_and(!bit, SeqCst);
        }
        fn fence(&self) {
            fence(SeqCst);
        }
        fn sleep_while(&self, word: u32) {
            let bed = self.bed.lock().unwrap();
            if self.word.load(SeqCst) == word {
                drop(self.woken.wait(bed).unwrap());
            }
        }
        fn wake_all(&self) {
            let _bed = self.bed.lock().unwrap();
            self.woken.notify_all();
        }
    }

    impl Model {
        fn new() -> Arc<Self> {
            let thread = || Thread { place: AtomicU64::new(0), work: UnsafeCell::new(0) };
            let (bed, woken) = (Mutex::new(()), Condvar::new());
            Arc::new(Self { word: AtomicU32::new(0), bed, woken, threads: [thread(), thread()] })
        }

        /// As `enter`, and the end of the call.
        fn call(&self, thread: usize) {
            let Thread { place, work } = &self.threads[thread];
            place.store(SlotState::load(place, Relaxed) + (BEGUN | INSIDE), Relaxed);
            fence(SeqCst);
            if Word::load(self, Acquire) != 0 {
                wait(self, place);
            }
            // SAFETY: a thread has its place to itself, and the closer reads when no thread is inside: loom checks it.
            work.with_mut(|work| unsafe { *work += 1 });
            place.store(SlotState::load(place, Relaxed) - INSIDE, Release);
        }

        /// As `close` and then `open`.
        fn close_and_open(&self) {
            shut(self);
            while self.threads.iter().any(|thread| is_inside(&thread.place)) {
                thread::yield_now();
            }
            for thread in &self.threads {
                // SAFETY: no thread is inside: loom checks it.
                thread.work.with(|work| unsafe { assert!(*work <= 2) });
            }
            open(self);
        }
    }

    fn check(threads: usize, calls: usize, closings: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || {
            let model = Model::new();
            let callers: Vec<_> = (0..threads)
                .map(|thread| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || (0..calls).for_each(|_| model.call(thread)))
                })
                .collect();
            (0..closings).for_each(|_| model.close_and_open());
            // A thread that is not woken is a deadlock, which loom reports.
            callers.into_iter().for_each(|caller| caller.join().unwrap());
            // Whoever had to wait at the gate has begun one call all the same.
            for thread in &model.threads[..threads] {
                let place = SlotState::load(&thread.place, Relaxed);
                assert_eq!((begun(place), depth(place)), (calls as u64, 0));
            }
        });
    }

    #[test]
    fn nobody_is_inside_and_everybody_is_woken() {
        check(1, 2, 1);
        check(2, 1, 1);
    }

    #[test]
    fn nobody_is_inside_when_it_closes_again() {
        check(1, 1, 2);
    }
}
