//! What threads do against each other at the gate, apart from what it is made of: the model below runs this code.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};

/// The bit of the gate's word that keeps calls out.
pub(super) const CLOSED: u32 = 1;

/// A number that several threads read and write.
pub(super) trait Number {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
}

/// The gate's word.
pub(super) trait Word: Number {
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
pub(super) fn wait(gate: &impl Word, inside: &impl Number) {
    loop {
        gate.fence();
        let word = gate.load(SeqCst);
        if word & CLOSED == 0 {
            return;
        }
        inside.store(0, Release);
        gate.sleep_while(word);
        inside.store(1, Relaxed);
    }
}

/// From now on no call begins. Before places are looked at, every thread has to have passed a fence.
pub(super) fn shut(gate: &impl Word) {
    gate.set(CLOSED);
    gate.fence();
}

/// Whether a thread is inside.
pub(super) fn is_inside(inside: &impl Number) -> bool {
    inside.load(Acquire) != 0
}

/// Lets everybody in.
pub(super) fn open(gate: &impl Word) {
    gate.clear(CLOSED);
    gate.wake_all();
}

/// Every way in which the threads can run, and every value that the memory model lets them read.
///
/// The fence between a passing thread's write and its look at the gate stands for the closer's membarrier(2), which
/// makes every thread pass one at some point of its own: the model cannot have a fence that another thread inserts.
/// So it leaves out a thread that is between its write and its look when the membarrier comes; that it then looks at
/// the gate later than the gate was shut, or has its write seen, is what membarrier(2) promises. Left out as well: calls
/// inside calls, deadlines, and slots that change hands.
#[cfg(test)]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, fence};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    struct Place {
        inside: AtomicU32,
        /// What a call does: written by who is inside, read by who has closed. Loom objects to both at once.
        work: UnsafeCell<u32>,
    }

    struct Model {
        word: AtomicU32,
        bed: Mutex<()>,
        woken: Condvar,
        places: [Place; 2],
    }

    impl Number for AtomicU32 {
        fn load(&self, order: Ordering) -> u32 {
            self.load(order)
        }
        fn store(&self, value: u32, order: Ordering) {
            self.store(value, order);
        }
    }

    impl Number for Model {
        fn load(&self, order: Ordering) -> u32 {
            self.word.load(order)
        }
        fn store(&self, value: u32, order: Ordering) {
            self.word.store(value, order);
        }
    }

    /// As futex(2): the word is compared under a lock that who wakes takes too.
    impl Word for Model {
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
            let place = || Place { inside: AtomicU32::new(0), work: UnsafeCell::new(0) };
            let (bed, woken) = (Mutex::new(()), Condvar::new());
            Arc::new(Self { word: AtomicU32::new(0), bed, woken, places: [place(), place()] })
        }

        /// As `enter`, and the end of the call.
        fn call(&self, place: usize) {
            let Place { inside, work } = &self.places[place];
            Number::store(inside, 1, Relaxed);
            fence(SeqCst);
            if Number::load(self, Acquire) != 0 {
                wait(self, inside);
            }
            // SAFETY: a thread has its place to itself, and who closes looks when nobody is inside: loom checks it.
            work.with_mut(|work| unsafe { *work += 1 });
            Number::store(inside, 0, Release);
        }

        /// As `close` and then `open`.
        fn close_and_open(&self) {
            shut(self);
            while self.places.iter().any(|place| is_inside(&place.inside)) {
                thread::yield_now();
            }
            for place in &self.places {
                // SAFETY: nobody is inside: loom checks it.
                place.work.with(|work| unsafe { assert!(*work <= 2) });
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
                .map(|place| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || (0..calls).for_each(|_| model.call(place)))
                })
                .collect();
            (0..closings).for_each(|_| model.close_and_open());
            // A thread that is not woken is a deadlock, which loom reports.
            callers.into_iter().for_each(|caller| caller.join().unwrap());
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
