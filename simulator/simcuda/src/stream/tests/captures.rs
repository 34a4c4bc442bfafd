use cuda_abi::sys::CUstreamCaptureStatus as Status;
use cuda_abi::types::{CUgraph, CUgraphNode};

use super::*;
use crate::{context, graph, testing};

// No test opens a capture with mode global: it would forbid calls to the other tests' threads.
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

const IMPLICIT: Result = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
const INVALIDATED: Result = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
const UNSUPPORTED: Result = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);

fn begin(stream: CUstream, mode: u32) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuStreamBeginCapture_v2(stream, mode) }
}

fn end(stream: CUstream) -> Result<CUgraph> {
    let mut graph = 1_usize as CUgraph;
    // SAFETY: `graph` is a local variable.
    let result = unsafe { cuStreamEndCapture(stream, &raw mut graph) };
    if result.is_err() {
        assert!(graph.is_null() || graph as usize == 1);
    }
    result.map(|()| graph)
}

/// Ends a capture that must have failed with this error, and gives no graph.
fn end_fails(stream: CUstream, error: CUresult) {
    let mut graph = 1_usize as CUgraph;
    // SAFETY: `graph` is a local variable.
    assert_eq!(unsafe { cuStreamEndCapture(stream, &raw mut graph) }, Err(error));
    assert!(graph.is_null());
}

fn status(stream: CUstream) -> Result<u32> {
    let mut status = 99;
    // SAFETY: `status` is a local variable.
    unsafe { cuStreamIsCapturing(stream, &raw mut status) }.map(|()| status)
}

/// How many nodes the graph has, and how many edges.
fn size(graph: CUgraph) -> (usize, usize) {
    let (mut nodes, mut edges) = (0, 0);
    let null = null_mut();
    // SAFETY: the counts are local variables; without arrays only the counts are written.
    unsafe {
        graph::cuGraphGetNodes(graph, null_mut(), &raw mut nodes).unwrap();
        graph::cuGraphGetEdges(graph, null, null, &raw mut edges).unwrap();
    }
    (nodes, edges)
}

/// Instantiates the graph and launches it on the stream, twice.
fn run_twice(graph: CUgraph, stream: CUstream) {
    let mut executable = null_mut();
    // SAFETY: `executable` is a local variable.
    unsafe { graph::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.unwrap();
    for _ in 0..2 {
        // SAFETY: the handles are of live objects.
        unsafe { graph::cuGraphLaunch(executable, stream) }.unwrap();
    }
    synchronize(stream).unwrap();
    // SAFETY: as above.
    unsafe { graph::cuGraphExecDestroy(executable) }.unwrap();
}

unsafe extern "C" fn note(data: *mut c_void) {
    // SAFETY: `data` comes from `note_on`, whose log lives as long as the test.
    let (log, text) = unsafe { &*data.cast::<(Log, &'static str)>() };
    log.note(text);
}

/// A host function that may run many times.
fn note_on(stream: CUstream, log: &Log, text: &'static str) -> Result {
    let data = Box::leak(Box::new((log.clone(), text)));
    // SAFETY: the function takes what is passed here.
    unsafe { cuLaunchHostFunc(stream, Some(note), (&raw mut *data).cast()) }
}

#[test]
fn captured_work_runs_when_its_graph_is_launched() {
    let _context = testing::context();
    let (stream, log) = (stream(BLOCKING), Log::default());
    begin(stream, RELAXED).unwrap();
    assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32));
    note_on(stream, &log, "one").unwrap();
    note_on(stream, &log, "two").unwrap();
    let graph = end(stream).unwrap();
    assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_NONE as u32));
    synchronize(stream).unwrap();
    assert!(log.all().is_empty());
    assert_eq!(size(graph), (2, 1));
    run_twice(graph, stream);
    assert_eq!(log.all(), ["one", "two", "one", "two"]);
}

#[test]
fn events_carry_a_capture_to_other_streams_and_back() {
    let _context = testing::context();
    let (origin, other, fork, join) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(0), event(0));
    let log = Log::default();
    begin(origin, THREAD_LOCAL).unwrap();
    note_on(origin, &log, "before the fork").unwrap();
    record(fork, origin).unwrap();
    wait_event(other, fork).unwrap();
    assert_eq!(status(other), Ok(Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32));
    note_on(other, &log, "branch").unwrap();
    note_on(origin, &log, "trunk").unwrap();
    record(join, other).unwrap();
    wait_event(origin, join).unwrap();
    note_on(origin, &log, "after the join").unwrap();
    let graph = end(origin).unwrap();
    assert_eq!(status(other), Ok(Status::CU_STREAM_CAPTURE_STATUS_NONE as u32));
    assert_eq!(size(graph), (4, 4));
    run_twice(graph, origin);
    let notes = log.all();
    assert_eq!((notes[0], notes[3]), ("before the fork", "after the join"));
    assert_eq!(notes.len(), 8);
}

#[test]
fn a_fork_has_to_be_joined() {
    let _context = testing::context();
    let (origin, other, fork, join) = (stream(BLOCKING), stream(BLOCKING), event(0), event(0));
    let log = Log::default();
    begin(origin, RELAXED).unwrap();
    record(fork, origin).unwrap();
    wait_event(other, fork).unwrap();
    note_on(other, &log, "joined").unwrap();
    record(join, other).unwrap();
    wait_event(origin, join).unwrap();
    note_on(other, &log, "not joined").unwrap();
    end_fails(origin, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    // The capture is over on both.
    synchronize(origin).unwrap();
    synchronize(other).unwrap();
}

#[test]
fn where_a_capture_begins_and_ends() {
    let context = testing::context();
    let (origin, other, fork) = (stream(BLOCKING), stream(BLOCKING), event(0));
    assert_eq!(begin(NULL, RELAXED), UNSUPPORTED);
    assert_eq!(begin(default_stream(LEGACY), RELAXED), UNSUPPORTED);
    assert_eq!(begin(origin, 3), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(end(origin), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    begin(origin, RELAXED).unwrap();
    assert_eq!(begin(origin, RELAXED), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    record(fork, origin).unwrap();
    wait_event(other, fork).unwrap();
    assert_eq!(end(other), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    end_fails(origin, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    // In the other modes the thread counts.
    let (stream, handle) = (origin as usize, context.handle);
    for (mode, expected) in [(THREAD_LOCAL, false), (RELAXED, true)] {
        begin(origin, mode).unwrap();
        let result = std::thread::spawn(move || {
            // SAFETY: the handle is of a live context.
            unsafe { context::cuCtxSetCurrent(handle as _) }.unwrap();
            end(stream as CUstream).map(|_| ())
        })
        .join()
        .unwrap();
        if expected {
            result.unwrap();
        } else {
            assert_eq!(result, Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
            end(origin).unwrap();
        }
    }
}

#[test]
fn waiting_and_asking_end_a_capture() {
    let _context = testing::context();
    let (stream, other_event) = (stream(NON_BLOCKING), event(0));
    type Call = (&'static str, fn(CUstream) -> Result);
    let calls: [Call; 5] = [
        ("cuStreamSynchronize", synchronize),
        ("cuStreamQuery", query),
        ("cuCtxSynchronize", |_| {
            // SAFETY: no parameters.
            unsafe { cuCtxSynchronize() }
        }),
        ("a synchronous call", |stream| submit_and_wait(stream, Work::Empty)),
        ("cuStreamAddCallback", |stream| {
            unsafe extern "C" fn callback(_: CUstream, _: CUresult, _: *mut c_void) {}
            // SAFETY: the function takes anything.
            unsafe { cuStreamAddCallback(stream, Some(callback), null_mut(), 0) }
        }),
    ];
    for (name, call) in calls {
        begin(stream, RELAXED).unwrap();
        assert_eq!(call(stream), UNSUPPORTED, "{name}");
        assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32), "{name}");
        assert_eq!(launch(stream, || {}), INVALIDATED, "{name}");
        assert_eq!(record(other_event, stream), INVALIDATED, "{name}");
        end_fails(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        synchronize(stream).unwrap();
    }
}

#[test]
fn captured_events_stand_for_no_work() {
    let _context = testing::context();
    let (stream, event) = (stream(NON_BLOCKING), event(0));
    let captured = Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
    type Call = unsafe fn(CUevent) -> Result;
    for call in [cuEventQuery as Call, cuEventSynchronize as Call] {
        begin(stream, RELAXED).unwrap();
        record(event, stream).unwrap();
        // SAFETY: handles are checked.
        assert_eq!(unsafe { call(event) }, captured);
        end_fails(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // Not before it is recorded again.
        // SAFETY: handles are checked.
        assert_eq!(unsafe { call(event) }, captured);
        assert_eq!(wait_event(stream, event), captured);
        record(event, stream).unwrap();
        synchronize(stream).unwrap();
        // SAFETY: handles are checked.
        assert_eq!(unsafe { call(event) }, Ok(()));
    }
}

#[test]
fn the_legacy_stream_is_out_of_use_while_a_blocking_stream_captures() {
    let _context = testing::context();
    let (blocking, event) = (stream(BLOCKING), event(0));
    let calls: [fn(CUevent) -> Result; 6] = [
        |_| launch(NULL, || {}),
        |_| submit_and_wait(NULL, Work::Empty),
        |_| synchronize(NULL),
        |_| query(NULL),
        |event| record(event, NULL),
        |event| wait_event(NULL, event),
    ];
    for call in calls {
        begin(blocking, RELAXED).unwrap();
        // To ask is allowed, and changes nothing.
        assert_eq!(status(NULL).map(|_| ()), IMPLICIT);
        assert_eq!(status(blocking), Ok(Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32));
        assert_eq!(call(event), IMPLICIT);
        end_fails(blocking, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    let non_blocking = stream(NON_BLOCKING);
    begin(non_blocking, RELAXED).unwrap();
    for call in calls {
        assert_eq!(call(event), Ok(()));
    }
    assert_eq!(size(end(non_blocking).unwrap()), (0, 0));
    // Another context's default stream has nothing to do with it.
    begin(blocking, RELAXED).unwrap();
    let _other = testing::context();
    launch(NULL, || {}).unwrap();
    assert_eq!(size(end(blocking).unwrap()), (0, 0));
}

#[test]
fn captures_do_not_merge_and_do_not_mix_with_real_work() {
    let _context = testing::context();
    let (one, two, event, real) = (stream(BLOCKING), stream(BLOCKING), event(0), event(0));
    begin(one, RELAXED).unwrap();
    begin(two, RELAXED).unwrap();
    record(event, one).unwrap();
    assert_eq!(wait_event(two, event), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE));
    end_fails(one, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    end_fails(two, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    record(real, two).unwrap();
    begin(one, RELAXED).unwrap();
    assert_eq!(wait_event(one, real), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
    end_fails(one, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

#[test]
fn external_events_become_nodes() {
    let _context = testing::context();
    let (captured, outside, recorded, awaited) = (stream(BLOCKING), stream(NON_BLOCKING), event(0), event(0));
    let (gate, log) = (Gate::new(), Log::default());
    begin(captured, RELAXED).unwrap();
    // SAFETY: handles are checked.
    unsafe {
        cuStreamWaitEvent(captured, awaited, 1).unwrap();
        note_on(captured, &log, "node").unwrap();
        cuEventRecordWithFlags(recorded, captured, 1).unwrap();
    }
    let graph = end(captured).unwrap();
    assert_eq!(size(graph), (3, 2));
    let mut executable = null_mut();
    // SAFETY: `executable` is a local variable.
    unsafe { graph::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.unwrap();
    log.on_behind(outside, &gate, "awaited");
    record(awaited, outside).unwrap();
    // SAFETY: the handles are of live objects.
    unsafe { graph::cuGraphLaunch(executable, captured) }.unwrap();
    // From the launch on, the event represents it.
    // SAFETY: handles are checked.
    assert_eq!(unsafe { cuEventQuery(recorded) }, NOT_READY);
    gate.open();
    // SAFETY: handles are checked.
    unsafe { cuEventSynchronize(recorded) }.unwrap();
    assert_eq!(log.all(), ["awaited", "node"]);
}

#[test]
fn unsafe_calls_end_a_capture_that_forbids_them() {
    let _context = testing::context();
    let stream = stream(NON_BLOCKING);
    let exchange = |mut mode: u32| {
        // SAFETY: `mode` is a local variable.
        unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }.map(|()| mode)
    };
    let ask = move |mode| {
        let before = exchange(mode).unwrap();
        let result = forbid_in_capture();
        assert_eq!(exchange(before), Ok(mode));
        result
    };
    for (mode, is_allowed) in [(0, false), (THREAD_LOCAL, false), (RELAXED, true)] {
        begin(stream, THREAD_LOCAL).unwrap();
        assert_eq!(std::thread::spawn(move || ask(mode)).join().unwrap(), Ok(()));
        assert_eq!(ask(mode), if is_allowed { Ok(()) } else { UNSUPPORTED });
        assert_eq!(end(stream).is_ok(), is_allowed);
    }
    assert_eq!(exchange(3), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: NULL is checked.
    let null = unsafe { cuThreadExchangeStreamCaptureMode(null_mut()) };
    assert_eq!(null, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}

#[test]
fn what_captures_forbid_to_whom() {
    use capture::Mode::{Global, Relaxed, ThreadLocal};
    // Mode of the capture, mode of the thread that asks, whether its own and others' captures forbid the call.
    let rules = [
        (Global, Global, true, true),
        (Global, ThreadLocal, true, false),
        (Global, Relaxed, false, false),
        (ThreadLocal, Global, true, false),
        (ThreadLocal, ThreadLocal, true, false),
        (ThreadLocal, Relaxed, false, false),
        (Relaxed, Global, false, false),
        (Relaxed, ThreadLocal, false, false),
        (Relaxed, Relaxed, false, false),
    ];
    for (mode, asking, own, others) in rules {
        assert_eq!(mode.forbids(asking, true), own, "{mode:?} {asking:?} own");
        assert_eq!(mode.forbids(asking, false), others, "{mode:?} {asking:?} others");
    }
}

/// What cuStreamGetCaptureInfo_v3 says: status, ID, graph, nodes.
fn info(stream: CUstream) -> Result<(u32, u64, CUgraph, Vec<CUgraphNode>)> {
    let (mut status, mut id, mut graph, mut count) = (99, 0, null_mut(), 0);
    let (mut nodes, mut edges) = (std::ptr::null(), std::ptr::null());
    // SAFETY: all out parameters are local variables.
    unsafe {
        cuStreamGetCaptureInfo_v3(
            stream,
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            &raw mut nodes,
            &raw mut edges,
            &raw mut count,
        )
    }?;
    let nodes = if count == 0 {
        Vec::new()
    } else {
        // SAFETY: the arrays are as long as the call said, until the next call.
        unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec()
    };
    Ok((status, id, graph, nodes))
}

#[test]
fn dependencies_can_be_seen_and_changed() {
    let _context = testing::context();
    let (stream, log) = (stream(BLOCKING), Log::default());
    assert_eq!(info(stream).unwrap().0, Status::CU_STREAM_CAPTURE_STATUS_NONE as u32);
    begin(stream, RELAXED).unwrap();
    let (_, id, graph, nodes) = info(stream).unwrap();
    assert!(id != 0 && !graph.is_null() && nodes.is_empty());
    note_on(stream, &log, "first").unwrap();
    let (_, same_id, same_graph, first) = info(stream).unwrap();
    assert_eq!((same_id, same_graph, first.len()), (id, graph, 1));
    note_on(stream, &log, "second").unwrap();
    let second = info(stream).unwrap().3;
    assert_ne!(first, second);
    let update = |nodes: &[CUgraphNode], flags| {
        // SAFETY: the array is as long as is said.
        unsafe { cuStreamUpdateCaptureDependencies(stream, nodes.as_ptr().cast_mut(), nodes.len(), flags) }
    };
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(update(&first, 2), invalid);
    assert_eq!(update(&[stream.cast()], 0), invalid);
    update(&first, 0).unwrap();
    assert_eq!(info(stream).unwrap().3.len(), 2);
    update(&first, 1).unwrap();
    assert_eq!(info(stream).unwrap().3, first);
    note_on(stream, &log, "third, beside the second").unwrap();
    let graph = end(stream).unwrap();
    assert_eq!(size(graph), (3, 2));
    assert_eq!(update(&first, 0), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
}

#[test]
fn a_capture_can_go_on_with_a_given_graph() {
    let _context = testing::context();
    let (stream, log) = (stream(BLOCKING), Log::default());
    let (mut graph, mut node) = (null_mut(), null_mut());
    // SAFETY: `graph` and `node` are local variables.
    unsafe {
        graph::cuGraphCreate(&raw mut graph, 0).unwrap();
        graph::cuGraphAddEmptyNode(&raw mut node, graph, std::ptr::null(), 0).unwrap();
    }
    let begin = |node: &CUgraphNode| {
        // SAFETY: there is one node, and no edge data.
        unsafe { cuStreamBeginCaptureToGraph(stream, graph, node, std::ptr::null(), 1, RELAXED) }
    };
    assert_eq!(begin(&stream.cast()), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    begin(&node).unwrap();
    note_on(stream, &log, "node").unwrap();
    assert_eq!(end(stream), Ok(graph));
    assert_eq!(size(graph), (2, 1));
    // It is the program's: a capture that fails leaves it alone.
    begin(&node).unwrap();
    assert_eq!(query(stream), UNSUPPORTED);
    end_fails(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    assert_eq!(size(graph), (2, 1));
}

#[test]
fn destroying_the_stream_or_the_context_ends_a_capture() {
    let context = testing::context();
    let (origin, other, fork) = (stream(BLOCKING), stream(BLOCKING), event(0));
    begin(origin, THREAD_LOCAL).unwrap();
    destroy(origin).unwrap();
    // Nothing is forbidden any more.
    forbid_in_capture().unwrap();
    launch(NULL, || {}).unwrap();
    let origin = stream(BLOCKING);
    begin(origin, RELAXED).unwrap();
    record(fork, origin).unwrap();
    wait_event(other, fork).unwrap();
    destroy(other).unwrap();
    end_fails(origin, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    begin(origin, THREAD_LOCAL).unwrap();
    // SAFETY: the handle is of a live context.
    unsafe { context::cuCtxDestroy_v2(context.handle as _) }.unwrap();
    forbid_in_capture().unwrap();
}

#[test]
fn drain_waits_for_the_end_of_captures() {
    let context = testing::context();
    let stream = stream(BLOCKING);
    begin(stream, RELAXED).unwrap();
    assert!(!drain(Some(Instant::now() + Duration::from_millis(5))));
    let (handle, graph) = (context.handle, stream as usize);
    let ending = std::thread::spawn(move || {
        // SAFETY: the handle is of a live context.
        unsafe { context::cuCtxSetCurrent(handle as _) }.unwrap();
        end(graph as CUstream).map(|_| ())
    });
    assert!(capture::wait_for_none(None));
    ending.join().unwrap().unwrap();
}
