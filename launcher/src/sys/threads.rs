//! Work on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};

/// What memory can give is reached with less.
const MOST_THREADS: usize = 16;

/// Works on all items, each in one of several threads.
pub fn on_all_cores<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let next = AtomicUsize::new(0);
    let work_on = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..cores.min(MOST_THREADS).min(items.len()) {
            // Without another thread, this one does the work.
            let _ = std::thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, work_on);
        }
        work_on();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once() {
        for count in [0, 1, 1000] {
            let items: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            on_all_cores(&items, |item| {
                item.fetch_add(1, Ordering::Relaxed);
            });
            assert!(items.iter().all(|item| item.load(Ordering::Relaxed) == 1));
        }
    }
}
