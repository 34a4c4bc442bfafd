use super::*;
use crate::memory::{cuMemAlloc_v2, cuMemAllocManaged};
use crate::{context, testing};

#[test]
fn work_on_one_stream_runs_in_order() {
    let _context = testing::context();
    for flags in [BLOCKING, NON_BLOCKING] {
        let (stream, gate, log) = (stream(flags), Gate::new(), Log::default());
        log.on_behind(stream, &gate, "first");
        log.on(stream, "second");
        log.on(stream, "third");
        assert_eq!(query(stream), NOT_READY);
        gate.open();
        synchronize(stream).unwrap();
        assert_eq!(log.all(), ["first", "second", "third"]);
        assert_eq!(query(stream), Ok(()));
    }
}

#[test]
fn streams_do_not_wait_for_each_other() {
    let _context = testing::context();
    let (held, free, gate) = (stream(BLOCKING), stream(BLOCKING), Gate::new());
    block(held, &gate);
    launch(free, || {}).unwrap();
    synchronize(free).unwrap();
    assert_eq!(query(held), NOT_READY);
    gate.open();
    synchronize(held).unwrap();
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams() {
    let _context = testing::context();
    for legacy in [NULL, default_stream(LEGACY)] {
        let (one, two, gate, log) = (stream(BLOCKING), stream(BLOCKING), Gate::new(), Log::default());
        log.on_behind(one, &gate, "blocking");
        log.on(legacy, "legacy");
        log.on(two, "blocking again");
        // The other blocking stream has nothing of its own to wait for but the legacy stream's work.
        assert_eq!(query(two), NOT_READY);
        assert_eq!(query(legacy), NOT_READY);
        gate.open();
        synchronize(two).unwrap();
        assert_eq!(log.all(), ["blocking", "legacy", "blocking again"]);
    }
}

#[test]
fn a_non_blocking_stream_is_exempt_both_ways() {
    let _context = testing::context();
    let (other, gate) = (stream(NON_BLOCKING), Gate::new());
    block(NULL, &gate);
    launch(other, || {}).unwrap();
    synchronize(other).unwrap();
    gate.open();
    synchronize(NULL).unwrap();
    let gate = Gate::new();
    block(other, &gate);
    launch(NULL, || {}).unwrap();
    synchronize(NULL).unwrap();
    assert_eq!(query(other), NOT_READY);
    gate.open();
    synchronize(other).unwrap();
}

#[test]
fn synchronizing_the_legacy_stream_waits_for_blocking_streams() {
    let _context = testing::context();
    let (one, gate) = (stream(BLOCKING), Gate::new());
    block(one, &gate);
    assert_eq!(query(NULL), NOT_READY);
    gate.open();
    synchronize(NULL).unwrap();
    assert_eq!(query(one), Ok(()));
}

#[test]
fn each_thread_has_a_default_stream_of_its_own() {
    let context = testing::context();
    let (gate, log) = (Gate::new(), Log::default());
    log.on_behind(default_stream(PER_THREAD), &gate, "mine");
    let handle = context.handle;
    let other_log = log.clone();
    std::thread::spawn(move || {
        // SAFETY: the handle is of a live context.
        unsafe { context::cuCtxSetCurrent(handle as _) }.unwrap();
        // Neither by name nor by the symbol's kind does this thread's stream wait for the other's.
        other_log.on(default_stream(PER_THREAD), "other");
        synchronize(default_stream(PER_THREAD)).unwrap();
        per_thread(|| {
            other_log.on(NULL, "other again");
            synchronize(NULL)
        })
        .unwrap();
    })
    .join()
    .unwrap();
    assert_eq!(log.all(), ["other", "other again"]);
    assert_eq!(per_thread(|| query(NULL)), NOT_READY);
    // It is a blocking stream: the legacy stream waits for it.
    log.on(default_stream(LEGACY), "legacy");
    gate.open();
    synchronize(NULL).unwrap();
    assert_eq!(log.all(), ["other", "other again", "mine", "legacy"]);
}

#[test]
fn a_context_waits_for_all_its_streams_and_no_others() {
    let first = testing::context();
    let (held, first_gate) = (stream(NON_BLOCKING), Gate::new());
    block(held, &first_gate);
    let _second = testing::context();
    // SAFETY: no parameters.
    unsafe { cuCtxSynchronize() }.unwrap();
    assert!(!first.streams.pending().is_empty());
    first_gate.open();
    // SAFETY: the handle is of a live context.
    unsafe { cuCtxSynchronize_v2(first.handle as _) }.unwrap();
    assert!(first.streams.pending().is_empty());
}

#[test]
fn a_destroyed_stream_still_does_its_work() {
    let context = testing::context();
    let (stream, gate, log) = (stream(BLOCKING), Gate::new(), Log::default());
    log.on_behind(stream, &gate, "queued");
    destroy(stream).unwrap();
    assert_eq!(launch(stream, || {}), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(destroy(stream), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    // The legacy stream still waits for it.
    log.on(NULL, "legacy");
    gate.open();
    synchronize_context(&context).unwrap();
    assert_eq!(log.all(), ["queued", "legacy"]);
}

#[test]
fn destroying_a_context_waits_for_what_runs_and_drops_the_rest() {
    let context = testing::context();
    let (stream, event, gate, log) = (stream(BLOCKING), event(0), Gate::new(), Log::default());
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (inner, note) = (Arc::clone(&gate), log.clone());
    launch(stream, move || {
        begun.send(()).unwrap();
        inner.wait();
        note.note("was running");
    })
    .unwrap();
    log.on(stream, "was queued");
    has_begun.recv().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !context.is_destroyed() {
                std::thread::yield_now();
            }
            gate.open();
        });
        // SAFETY: the handle is of a live context.
        unsafe { context::cuCtxDestroy_v2(context.handle as _) }.unwrap();
        assert_eq!(log.all(), ["was running"]);
    });
    assert!(context.streams.pending().is_empty());
    // SAFETY: the handle is checked.
    let again = unsafe { context::cuCtxDestroy_v2(context.handle as _) };
    assert_eq!(again, Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    let _other = testing::context();
    assert_eq!(launch(stream, || {}), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(record(event, NULL), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

#[test]
fn a_context_can_be_destroyed_while_it_waits_for_another_one() {
    let (other, gate) = (testing::context(), Gate::new());
    let (busy, recorded) = (stream(NON_BLOCKING), event(0));
    block(busy, &gate);
    record(recorded, busy).unwrap();
    let context = testing::context();
    let waiting = stream(NON_BLOCKING);
    wait_event(waiting, recorded).unwrap();
    launch(waiting, || panic!("its turn never comes")).unwrap();
    // SAFETY: the handle is of a live context.
    unsafe { context::cuCtxDestroy_v2(context.handle as _) }.unwrap();
    assert!(context.streams.pending().is_empty());
    assert!(!other.streams.pending().is_empty(), "the gate is still closed");
    gate.open();
    synchronize_context(&other).unwrap();
}

#[test]
fn streams_go_away_with_their_last_work() {
    let context = testing::context();
    let idle = stream(BLOCKING);
    destroy(idle).unwrap();
    let used = stream(BLOCKING);
    let weak = Arc::downgrade(&find(used).unwrap());
    launch(used, || {}).unwrap();
    destroy(used).unwrap();
    synchronize_context(&context).unwrap();
    // Its thread is about to end.
    let deadline = Instant::now() + Duration::from_secs(60);
    while weak.upgrade().is_some() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(weak.upgrade().is_none());
}

#[test]
fn an_error_stays_and_later_work_is_dropped() {
    let context = testing::context();
    let (stream, gate, log) = (stream(NON_BLOCKING), Gate::new(), Log::default());
    block(stream, &gate);
    fail(stream);
    log.on(stream, "after the error");
    log.on(NULL, "on another stream, behind an event");
    gate.open();
    let illegal = Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(synchronize(stream), illegal);
    assert_eq!(query(stream), illegal);
    assert_eq!(launch(stream, || {}), illegal);
    // SAFETY: no parameters.
    assert_eq!(unsafe { cuCtxSynchronize() }, illegal);
    assert!(!log.all().contains(&"after the error"));
    // Other contexts are not touched.
    let _other = testing::context();
    launch(NULL, || {}).unwrap();
    synchronize(NULL).unwrap();
    // SAFETY: the handle is of a live context.
    unsafe { context::cuCtxDestroy_v2(context.handle as _) }.unwrap();
}

#[test]
fn a_panic_in_work_is_a_launch_failure() {
    let _context = testing::context();
    let stream = stream(BLOCKING);
    enqueue(&find(stream).unwrap(), Task::Panic, Vec::new()).unwrap();
    assert_eq!(synchronize(stream), Err(CUresult::CUDA_ERROR_LAUNCH_FAILED));
}

#[test]
fn synchronous_work_is_done_when_the_call_returns() {
    let _context = testing::context();
    let log = Log::default();
    let note = log.clone();
    // SAFETY: the function takes what `body_data` gives.
    let work = Work::Host(HostFunction::new(Some(call_body), body_data(move || note.note("done"))).unwrap());
    submit_and_wait(NULL, work).unwrap();
    assert_eq!(log.all(), ["done"]);
}

#[test]
fn submissions_wait_for_room_in_the_queue() {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    let context = testing::context();
    let (stream, gate) = (stream(BLOCKING) as usize, Gate::new());
    let (submitted, at_first) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    block(stream as CUstream, &gate);
    std::thread::scope(|scope| {
        let (submitted, at_first, handle) = (&submitted, &at_first, context.handle);
        scope.spawn(move || {
            // SAFETY: the handle is of a live context.
            unsafe { context::cuCtxSetCurrent(handle as _) }.unwrap();
            let (count, first) = (Arc::clone(submitted), Arc::clone(at_first));
            launch(stream as CUstream, move || first.store(count.load(SeqCst), SeqCst)).unwrap();
            for count in 0..3 * queue::DEPTH {
                submitted.store(count, SeqCst);
                launch(stream as CUstream, || {}).unwrap();
            }
        });
        while submitted.load(SeqCst) < queue::DEPTH - 2 {
            std::thread::yield_now();
        }
        gate.open();
    });
    synchronize(stream as CUstream).unwrap();
    // When the first piece of work ran, that and the one that held it back had left the queue.
    assert!(at_first.load(SeqCst) <= queue::DEPTH, "{at_first:?}");
}

#[test]
fn drain_waits_for_host_functions_until_its_deadline() {
    let context = testing::context();
    let (stream, gate) = (stream(NON_BLOCKING), Gate::new());
    block(stream, &gate);
    // Other tests' work may be under way too: nothing but "no" can be said of all contexts.
    assert!(!drain(Some(Instant::now() + Duration::from_millis(10))));
    gate.open();
    synchronize_context(&context).unwrap();
}

#[test]
fn without_a_context_there_is_no_stream() {
    let _context = testing::context();
    let created = stream(BLOCKING);
    std::thread::spawn({
        let created = created as usize;
        move || {
            let invalid = Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
            assert_eq!(launch(NULL, || {}), invalid);
            assert_eq!(launch(default_stream(PER_THREAD), || {}), invalid);
            assert_eq!(launch(created as CUstream, || {}), invalid);
            assert_eq!(synchronize(NULL), invalid);
            // A created stream knows its context.
            assert_eq!(synchronize(created as CUstream), Ok(()));
        }
    })
    .join()
    .unwrap();
    assert_eq!(launch(0xdead_0000 as CUstream, || {}), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(destroy(NULL), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(destroy(default_stream(LEGACY)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

#[test]
fn properties_of_streams() {
    let context = testing::context_on(1);
    let mut handle = null_mut();
    // SAFETY: `handle` is a local variable.
    assert_eq!(unsafe { cuStreamCreate(&raw mut handle, 2) }, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: as above.
    unsafe { cuStreamCreateWithPriority(&raw mut handle, NON_BLOCKING, -100) }.unwrap();
    let (mut flags, mut priority, mut device, mut id, mut default_id) = (9, 9, 9, 0, 0);
    let (mut owner, mut green) = (null_mut(), 1_usize as _);
    // SAFETY: all out parameters are local variables.
    unsafe {
        cuStreamGetFlags(handle, &raw mut flags).unwrap();
        cuStreamGetPriority(handle, &raw mut priority).unwrap();
        cuStreamGetDevice(handle, &raw mut device).unwrap();
        cuStreamGetId(handle, &raw mut id).unwrap();
        cuStreamGetId(NULL, &raw mut default_id).unwrap();
        cuStreamGetCtx_v2(handle, &raw mut owner, &raw mut green).unwrap();
    }
    assert_eq!((flags, priority, device), (NON_BLOCKING, -5, 1));
    assert_ne!(id, default_id);
    assert_eq!((owner as usize, green), (context.handle, null_mut()));
    let (mut least, mut greatest) = (9, 9);
    // SAFETY: both are local variables, and NULL is allowed.
    unsafe {
        cuCtxGetStreamPriorityRange(&raw mut least, null_mut()).unwrap();
        cuCtxGetStreamPriorityRange(null_mut(), &raw mut greatest).unwrap();
    }
    assert_eq!((least, greatest), (0, -5));
}

#[test]
fn managed_memory_can_be_attached_as_a_whole() {
    let _context = testing::context();
    let (stream, invalid) = (stream(BLOCKING), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let (mut managed, mut plain) = (0, 0);
    // SAFETY: both are local variables.
    unsafe {
        cuMemAllocManaged(&raw mut managed, 4096, 1).unwrap();
        cuMemAlloc_v2(&raw mut plain, 4096).unwrap();
    }
    let attach = |stream, address, size_bytes, flags| {
        // SAFETY: all parameters are checked.
        unsafe { cuStreamAttachMemAsync(stream, address, size_bytes, flags) }
    };
    let (global, single) = (1, 4);
    attach(stream, managed, 0, single).unwrap();
    attach(stream, managed, 4096, global).unwrap();
    assert_eq!(attach(stream, managed, 100, global), invalid);
    assert_eq!(attach(stream, managed, 0, 3), invalid);
    assert_eq!(attach(NULL, managed, 0, single), invalid);
    assert_eq!(attach(stream, plain, 0, global), invalid);
    synchronize(stream).unwrap();
}

#[test]
fn attributes_are_checked_kept_and_copied() {
    let _context = testing::context();
    let (from, to) = (stream(BLOCKING), stream(BLOCKING));
    let mut value = [0_u64; 8];
    let out = (&raw mut value).cast();
    let policy = 3;
    // SAFETY: `value` has the size of the union.
    unsafe {
        cuStreamGetAttribute(from, policy, out).unwrap();
        assert_eq!(value[0], 1);
        value[0] = 4;
        cuStreamSetAttribute(from, policy, out).unwrap();
        value[0] = 5;
        assert_eq!(cuStreamSetAttribute(from, policy, out), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
        assert_eq!(cuStreamGetAttribute(from, 2, out), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
        cuStreamCopyAttributes(to, from).unwrap();
        cuStreamGetAttribute(to, policy, out).unwrap();
    }
    assert_eq!(value[0], 4);
}
