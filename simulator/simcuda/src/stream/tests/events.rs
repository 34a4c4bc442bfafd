use super::*;
use crate::testing;

fn query_event(event: CUevent) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuEventQuery(event) }
}

fn synchronize_event(event: CUevent) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuEventSynchronize(event) }
}

fn elapsed_ms(start: CUevent, end: CUevent) -> Result<f32> {
    let mut milliseconds = f32::NAN;
    // SAFETY: `milliseconds` is a local variable.
    unsafe { cuEventElapsedTime(&raw mut milliseconds, start, end) }.map(|()| milliseconds)
}

#[test]
fn an_event_that_was_never_recorded_is_complete() {
    let _context = testing::context();
    let (event, stream) = (event(0), stream(BLOCKING));
    assert_eq!(query_event(event), Ok(()));
    assert_eq!(synchronize_event(event), Ok(()));
    wait_event(stream, event).unwrap();
    assert_eq!(query(stream), Ok(()));
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let _context = testing::context();
    let (first, second, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(NO_TIMING));
    let (gate, log) = (Gate::new(), Log::default());
    log.on_behind(first, &gate, "before the event");
    record(event, first).unwrap();
    wait_event(second, event).unwrap();
    log.on(second, "behind the event");
    assert_eq!(query_event(event), NOT_READY);
    assert_eq!(query(second), NOT_READY);
    gate.open();
    synchronize(second).unwrap();
    assert_eq!(log.all(), ["before the event", "behind the event"]);
    assert_eq!(query_event(event), Ok(()));
}

#[test]
fn without_the_wait_a_stream_overtakes() {
    let _context = testing::context();
    let (first, second, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(NO_TIMING));
    let (gate, log) = (Gate::new(), Log::default());
    log.on_behind(first, &gate, "before the event");
    record(event, first).unwrap();
    log.on(second, "not behind the event");
    synchronize(second).unwrap();
    gate.open();
    synchronize(first).unwrap();
    assert_eq!(log.all(), ["not behind the event", "before the event"]);
}

#[test]
fn a_wait_stands_for_the_record_at_the_time_of_the_call() {
    let _context = testing::context();
    let (first, second, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(NO_TIMING));
    let gate = Gate::new();
    record(event, first).unwrap();
    wait_event(second, event).unwrap();
    block(first, &gate);
    record(event, first).unwrap();
    // The second record is not what the stream waits for, but what the event now is.
    synchronize(second).unwrap();
    assert_eq!(query_event(event), NOT_READY);
    gate.open();
    synchronize_event(event).unwrap();
}

#[test]
fn a_wait_outlives_its_event_and_its_stream() {
    let _context = testing::context();
    let (first, second, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(NO_TIMING));
    let (gate, log) = (Gate::new(), Log::default());
    log.on_behind(first, &gate, "first");
    record(event, first).unwrap();
    wait_event(second, event).unwrap();
    log.on(second, "second");
    // SAFETY: handles are checked.
    unsafe { cuEventDestroy_v2(event) }.unwrap();
    destroy(first).unwrap();
    assert_eq!(query_event(event), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    gate.open();
    synchronize(second).unwrap();
    assert_eq!(log.all(), ["first", "second"]);
}

#[test]
fn events_on_the_legacy_stream_stand_for_all_blocking_streams() {
    let _context = testing::context();
    let (stream, event, gate) = (stream(BLOCKING), event(NO_TIMING), Gate::new());
    block(stream, &gate);
    record(event, NULL).unwrap();
    assert_eq!(query_event(event), NOT_READY);
    gate.open();
    synchronize_event(event).unwrap();
    assert_eq!(query(stream), Ok(()));
}

#[test]
fn times_between_events() {
    let _context = testing::context();
    let (stream, start, end, gate) = (stream(BLOCKING), event(0), event(0), Gate::new());
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(elapsed_ms(start, end), invalid);
    record(start, stream).unwrap();
    assert_eq!(elapsed_ms(start, end), invalid);
    launch(stream, || std::thread::sleep(Duration::from_millis(20))).unwrap();
    block(stream, &gate);
    record(end, stream).unwrap();
    assert_eq!(elapsed_ms(start, end), Err(CUresult::CUDA_ERROR_NOT_READY));
    gate.open();
    synchronize_event(end).unwrap();
    let milliseconds = elapsed_ms(start, end).unwrap();
    assert!(milliseconds >= 20.0, "{milliseconds}");
    assert_eq!(elapsed_ms(end, start).unwrap(), -milliseconds);
    let untimed = event(NO_TIMING);
    record(untimed, stream).unwrap();
    synchronize_event(untimed).unwrap();
    assert_eq!(elapsed_ms(start, untimed), invalid);
}

#[test]
fn what_event_calls_refuse() {
    let _first = testing::context();
    let foreign = event(0);
    let _second = testing::context();
    let (own, mut out) = (event(0), null_mut());
    let invalid_value = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    // SAFETY: `out` is a local variable.
    unsafe {
        assert_eq!(cuEventCreate(&raw mut out, 8), invalid_value);
        // An event for other processes has no time.
        assert_eq!(cuEventCreate(&raw mut out, 4), invalid_value);
        cuEventCreate(&raw mut out, 6).unwrap();
        assert_eq!(cuEventCreate(null_mut(), 0), invalid_value);
        assert_eq!(cuEventRecordWithFlags(own, NULL, 2), invalid_value);
        // External records and waits are for captures.
        assert_eq!(cuEventRecordWithFlags(own, NULL, 1), invalid_value);
        assert_eq!(cuStreamWaitEvent(NULL, own, 1), invalid_value);
        assert_eq!(cuStreamWaitEvent(NULL, own, 2), invalid_value);
    }
    assert_eq!(record(foreign, NULL), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    // Waiting across contexts is fine.
    assert_eq!(wait_event(NULL, foreign), Ok(()));
    assert_eq!(record(null_mut(), NULL), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(elapsed_ms(foreign, own), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

#[test]
fn an_event_of_a_whole_context() {
    let context = testing::context();
    let (held, event, gate, log) = (stream(NON_BLOCKING), event(NO_TIMING), Gate::new(), Log::default());
    log.on_behind(held, &gate, "held");
    let handle = context.handle as _;
    // SAFETY: the handles are of live objects.
    unsafe { cuCtxRecordEvent(handle, event) }.unwrap();
    assert_eq!(query_event(event), NOT_READY);
    // SAFETY: as above.
    unsafe { cuCtxWaitEvent(handle, event) }.unwrap();
    let later = stream(NON_BLOCKING);
    log.on(later, "later");
    assert_eq!(query(later), NOT_READY);
    gate.open();
    synchronize(later).unwrap();
    assert_eq!(log.all(), ["held", "later"]);
}

#[test]
fn events_tell_the_error_of_their_context() {
    let _context = testing::context();
    let (stream, event, gate) = (stream(BLOCKING), event(0), Gate::new());
    block(stream, &gate);
    fail(stream);
    record(event, stream).unwrap();
    gate.open();
    let _ = synchronize(stream);
    assert_eq!(query_event(event), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(synchronize_event(event), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
}
