use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::{context, testing};

/// Runs `body` on `count` threads to which the context is current.
fn on_threads(count: u64, context: &Arc<Context>, body: impl Fn(u64) + Send + Sync) {
    std::thread::scope(|scope| {
        for index in 0..count {
            let (body, handle) = (&body, context.handle);
            scope.spawn(move || {
                // SAFETY: the handle is of a live context.
                unsafe { context::cuCtxSetCurrent(handle as _) }.unwrap();
                body(index);
            });
        }
    });
}

#[test]
fn sixteen_threads_with_their_own_default_streams() {
    let context = testing::context();
    let total = Arc::new(AtomicU64::new(0));
    on_threads(16, &context, |_| {
        let seen = Arc::new(AtomicU64::new(0));
        for ticket in 0..200 {
            let (seen, total) = (Arc::clone(&seen), Arc::clone(&total));
            per_thread(|| {
                launch(NULL, move || {
                    // On each stream in order, whatever the other threads do.
                    if seen.fetch_add(1, Ordering::Relaxed) == ticket {
                        total.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .unwrap();
        }
        per_thread(|| synchronize(NULL)).unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), 200);
    });
    assert_eq!(total.load(Ordering::Relaxed), 16 * 200);
}

#[test]
fn many_threads_on_one_stream() {
    let context = testing::context();
    let (stream, total) = (stream(BLOCKING) as usize, Arc::new(AtomicU64::new(0)));
    on_threads(8, &context, |_| {
        for _ in 0..500 {
            let total = Arc::clone(&total);
            launch(stream as CUstream, move || {
                total.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
    });
    synchronize(stream as CUstream).unwrap();
    assert_eq!(total.load(Ordering::Relaxed), 8 * 500);
}

#[test]
fn streams_come_and_go_with_work_on_them() {
    let context = testing::context();
    let total = Arc::new(AtomicU64::new(0));
    on_threads(8, &context, |index| {
        for round in 0..50 {
            let stream = stream(if (index + round) % 2 == 0 { BLOCKING } else { NON_BLOCKING });
            let event = event(NO_TIMING);
            for target in [stream, NULL] {
                let total = Arc::clone(&total);
                launch(target, move || {
                    total.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                record(event, target).unwrap();
                wait_event(stream, event).unwrap();
            }
            // SAFETY: handles are checked.
            unsafe { cuEventDestroy_v2(event) }.unwrap();
            destroy(stream).unwrap();
        }
    });
    synchronize_context(&context).unwrap();
    assert_eq!(total.load(Ordering::Relaxed), 8 * 50 * 2);
}

#[test]
fn a_context_may_go_while_others_submit() {
    for _ in 0..20 {
        let context = testing::context();
        let handle = context.handle;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || {
                    // SAFETY: the handle is checked; the context may be destroyed already.
                    if unsafe { context::cuCtxSetCurrent(handle as _) }.is_err() {
                        return;
                    }
                    let error = loop {
                        if let Err(error) = launch(NULL, || {}).and(per_thread(|| launch(NULL, || {}))) {
                            break error;
                        }
                    };
                    assert_eq!(error, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
                });
            }
            // SAFETY: the handle is of a live context.
            unsafe { context::cuCtxDestroy_v2(handle as _) }.unwrap();
        });
        assert!(context.streams.pending().is_empty());
    }
}
