//! Stream capture: what becomes a graph, and what must not happen meanwhile.

use cuda_abi::sys::{
    CUevent_flags, CUstream_flags, CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status,
};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::{cu, gives, gpu, kernels, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "capture/runs-later",
        "captured work runs when the graph is launched, each time (programming guide, CUDA graphs)",
        runs_later,
    ),
    check(
        "capture/status",
        "the status is NONE, ACTIVE and NONE again (reference, cuStreamIsCapturing)",
        status,
    ),
    check(
        "capture/info",
        "cuStreamGetCaptureInfo gives an ID, the graph and the dependencies (reference)",
        info,
    ),
    check("capture/begin-twice", "a capturing stream cannot begin another capture", begin_twice),
    check("capture/end-without", "a stream that does not capture cannot end a capture", end_without),
    check(
        "capture/legacy",
        "the legacy default stream cannot be captured (reference, cuStreamBeginCapture)",
        legacy,
    ),
    check(
        "capture/synchronise",
        "synchronising a capturing stream is STREAM_CAPTURE_UNSUPPORTED and invalidates the capture",
        synchronise,
    ),
    check("capture/query", "querying a capturing stream is STREAM_CAPTURE_UNSUPPORTED", query),
    check(
        "capture/context-synchronise",
        "synchronising the context during a capture is STREAM_CAPTURE_UNSUPPORTED",
        context_synchronise,
    ),
    check(
        "capture/alloc-global",
        "cuMemAlloc in a global capture is STREAM_CAPTURE_UNSUPPORTED (reference, capture modes)",
        alloc_global,
    ),
    check(
        "capture/alloc-relaxed",
        "cuMemAlloc in a relaxed capture is permitted (reference, capture modes)",
        alloc_relaxed,
    ),
    check(
        "capture/alloc-other-thread",
        "a global capture forbids another thread's cuMemAlloc, a thread-local one does not (reference)",
        alloc_other_thread,
    ),
    check(
        "capture/exchange-mode",
        "a thread in relaxed mode may do what a global capture forbids (reference)",
        exchange_mode,
    ),
    check(
        "capture/implicit",
        "using the legacy stream while a blocking stream captures is STREAM_CAPTURE_IMPLICIT (reference)",
        implicit,
    ),
    check(
        "capture/fork-join",
        "events bring another stream into the capture and back (programming guide)",
        fork_join,
    ),
    check(
        "capture/unjoined",
        "a stream that was not brought back is STREAM_CAPTURE_UNJOINED (reference)",
        unjoined,
    ),
    check(
        "capture/captured-event",
        "a captured event cannot be queried or waited for: CAPTURED_EVENT (reference)",
        captured_event,
    ),
    check(
        "capture/isolation",
        "waiting for an event from before the capture is STREAM_CAPTURE_ISOLATION (reference)",
        isolation,
    ),
    check("capture/merge", "two captures cannot be joined: STREAM_CAPTURE_MERGE (reference)", merge),
    check(
        "capture/wrong-thread",
        "a capture that is not relaxed ends on its thread: STREAM_CAPTURE_WRONG_THREAD (reference)",
        wrong_thread,
    ),
    check("capture/copies-and-fills", "copies, fills and host functions become nodes", copies_and_fills),
    check("capture/to-graph", "cuStreamBeginCaptureToGraph adds to a graph (reference)", to_graph),
    check(
        "capture/pool-memory",
        "cuMemAllocAsync and cuMemFreeAsync become nodes (programming guide, Graph memory nodes)",
        pool_memory,
    ),
];

fn begin(stream: CUstream, mode: Mode) -> Result {
    ok!(cuStreamBeginCapture_v2(stream, mode as u32));
    Ok(())
}

fn end(stream: CUstream) -> Result<CUgraph> {
    let mut graph = std::ptr::null_mut();
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    Ok(graph)
}

/// Ends a capture that has been invalidated.
fn end_invalidated(stream: CUstream) -> Result {
    let mut graph = std::ptr::dangling_mut();
    gives!(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &raw mut graph));
    expect_equal("the graph", graph, std::ptr::null_mut())
}

fn nodes(graph: CUgraph) -> Result<usize> {
    let mut count = 0;
    ok!(cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count));
    Ok(count)
}

fn run(graph: CUgraph, stream: CUstream) -> Result {
    let mut exec = std::ptr::null_mut();
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    ok!(cuGraphLaunch(exec, stream));
    ok!(cuStreamSynchronize(stream));
    ok!(cuGraphExecDestroy(exec));
    Ok(())
}

fn untimed() -> Result<CUevent> {
    gpu::event(CUevent_flags::CU_EVENT_DISABLE_TIMING)
}

/// Whether cuMemAlloc is permitted.
fn alloc_code() -> Result<String> {
    let mut address = 0;
    Ok(gpu::name_of(cu!(cuMemAlloc_v2(&raw mut address, 4096))))
}

const UNSUPPORTED: &str = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";

fn runs_later() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (stream, address) = (gpu::stream()?, gpu::upload(&[1_u32])?);
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    gpu::launch(affine, 1, 1, stream, &[address, 3, 1])?;
    gpu::launch(affine, 1, 1, stream, &[address, 1, 4])?;
    let graph = end(stream)?;
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[1_u32])?;
    run(graph, stream)?;
    gpu::expect_content(address, &[8_u32])?;
    run(graph, stream)?;
    gpu::expect_content(address, &[29_u32])
}

fn status() -> Result {
    gpu::start()?;
    let (stream, mut status) = (gpu::stream()?, 77);
    let wanted = [Status::CU_STREAM_CAPTURE_STATUS_NONE, Status::CU_STREAM_CAPTURE_STATUS_ACTIVE];
    ok!(cuStreamIsCapturing(stream, &raw mut status));
    expect_equal("before", status, wanted[0] as u32)?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    ok!(cuStreamIsCapturing(stream, &raw mut status));
    expect_equal("during", status, wanted[1] as u32)?;
    end(stream)?;
    ok!(cuStreamIsCapturing(stream, &raw mut status));
    expect_equal("after", status, wanted[0] as u32)
}

fn info() -> Result {
    gpu::start()?;
    let count = gpu::function(kernels::BASIC, "count")?;
    let (stream, address) = (gpu::stream()?, gpu::upload(&[0_u32])?);
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    gpu::launch(count, 1, 1, stream, &[address])?;
    let (mut status, mut id, mut graph) = (77, 0, std::ptr::null_mut());
    let (mut dependencies, mut number): (*const CUgraphNode, usize) = (std::ptr::null(), 0);
    ok!(cuStreamGetCaptureInfo_v2(
        stream,
        &raw mut status,
        &raw mut id,
        &raw mut graph,
        &raw mut dependencies,
        &raw mut number,
    ));
    expect_equal("status", status, Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32)?;
    expect_equal("dependencies of the next node", number, 1)?;
    expect_equal("nodes so far", nodes(graph)?, 1)?;
    expect_equal("the graph at the end", end(stream)?, graph)
}

fn begin_twice() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    refuses!(cuStreamBeginCapture_v2(stream, 0));
    Ok(())
}

fn end_without() -> Result {
    gpu::start()?;
    let mut graph = std::ptr::null_mut();
    refuses!(cuStreamEndCapture(gpu::stream()?, &raw mut graph));
    Ok(())
}

fn legacy() -> Result {
    gpu::start()?;
    refuses!(cuStreamBeginCapture_v2(std::ptr::null_mut(), 0));
    refuses!(cuStreamBeginCapture_v2(gpu::stream()?, 9));
    Ok(())
}

fn synchronise() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    gives!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
    let mut status = 77;
    ok!(cuStreamIsCapturing(stream, &raw mut status));
    expect_equal("status", status, Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32)?;
    end_invalidated(stream)?;
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

fn query() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    gives!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamQuery(stream));
    end_invalidated(stream)
}

fn context_synchronise() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    gives!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
    end_invalidated(stream)
}

fn alloc_global() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    expect_equal("cuMemAlloc", alloc_code()?, UNSUPPORTED.into())?;
    end_invalidated(stream)?;
    expect_equal("cuMemAlloc afterwards", alloc_code()?, "CUDA_SUCCESS".into())
}

fn alloc_relaxed() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    expect_equal("cuMemAlloc", alloc_code()?, "CUDA_SUCCESS".into())?;
    end(stream).map(|_| ())
}

fn in_thread<T: Send + 'static>(
    context: CUcontext,
    body: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let context = context as usize;
    let thread = std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(context as CUcontext));
        body()
    });
    thread.join().unwrap_or_else(|_| failed("a thread panicked"))
}

fn alloc_other_thread() -> Result {
    let context = gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    expect_equal("during a thread-local one", in_thread(context, alloc_code)?, "CUDA_SUCCESS".into())?;
    end(stream)?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    expect_equal("during a global one", in_thread(context, alloc_code)?, UNSUPPORTED.into())?;
    end_invalidated(stream)
}

fn exchange_mode() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    let mut mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
    ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    expect_equal("the mode before", mode, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32)?;
    expect_equal("cuMemAlloc", alloc_code()?, "CUDA_SUCCESS".into())?;
    ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    expect_equal("the mode in between", mode, Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32)?;
    end(stream).map(|_| ())
}

fn implicit() -> Result {
    gpu::start()?;
    let stream = gpu::stream_with(CUstream_flags::CU_STREAM_DEFAULT)?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    let code = gpu::try_launch(count, [1; 3], [1; 3], 0, std::ptr::null_mut(), &[address])?;
    expect_equal("a launch", gpu::name_of(code), "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT".into())
}

fn fork_join() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (first, second, address) = (gpu::stream()?, gpu::stream()?, gpu::upload(&[1_u32])?);
    let (fork, join) = (untimed()?, untimed()?);
    begin(first, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    gpu::launch(affine, 1, 1, first, &[address, 1, 1])?;
    ok!(cuEventRecord(fork, first));
    ok!(cuStreamWaitEvent(second, fork, 0));
    gpu::launch(affine, 1, 1, second, &[address, 5, 0])?;
    ok!(cuEventRecord(join, second));
    ok!(cuStreamWaitEvent(first, join, 0));
    gpu::launch(affine, 1, 1, first, &[address, 1, 3])?;
    let graph = end(first)?;
    expect_equal("nodes", nodes(graph)?, 3)?;
    run(graph, first)?;
    gpu::expect_content(address, &[13_u32])
}

fn unjoined() -> Result {
    gpu::start()?;
    let count = gpu::function(kernels::BASIC, "count")?;
    let (first, second, address, fork) = (gpu::stream()?, gpu::stream()?, gpu::upload(&[0_u32])?, untimed()?);
    begin(first, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    ok!(cuEventRecord(fork, first));
    ok!(cuStreamWaitEvent(second, fork, 0));
    gpu::launch(count, 1, 1, second, &[address])?;
    let mut graph = std::ptr::dangling_mut();
    gives!(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(first, &raw mut graph));
    expect_equal("the graph", graph, std::ptr::null_mut())
}

fn captured_event() -> Result {
    gpu::start()?;
    let (stream, event) = (gpu::stream()?, untimed()?);
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    ok!(cuEventRecord(event, stream));
    gives!(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(event));
    Ok(())
}

fn isolation() -> Result {
    gpu::start()?;
    let (first, second, event) = (gpu::stream()?, gpu::stream()?, untimed()?);
    ok!(cuEventRecord(event, second));
    begin(first, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    gives!(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cuStreamWaitEvent(first, event, 0));
    Ok(())
}

fn merge() -> Result {
    gpu::start()?;
    let (first, second, event) = (gpu::stream()?, gpu::stream()?, untimed()?);
    begin(first, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    begin(second, Mode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    ok!(cuEventRecord(event, second));
    gives!(CUDA_ERROR_STREAM_CAPTURE_MERGE, cuStreamWaitEvent(first, event, 0));
    Ok(())
}

fn wrong_thread() -> Result {
    let context = gpu::start()?;
    let stream = gpu::stream()?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let handle = stream as usize;
    let code = in_thread(context, move || {
        let mut graph = std::ptr::null_mut();
        Ok(cu!(cuStreamEndCapture(handle as CUstream, &raw mut graph)))
    })?;
    expect_equal("cuStreamEndCapture", gpu::name_of(code), "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD".into())
}

unsafe extern "C" fn nothing(_: *mut c_void) {}

fn copies_and_fills() -> Result {
    gpu::start()?;
    let (stream, first, second) = (gpu::stream()?, gpu::alloc(4096)?, gpu::alloc(4096)?);
    let memory = gpu::pinned(4096)?;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    ok!(cuMemsetD8Async(first, 7, 4096, stream));
    ok!(cuMemcpyDtoDAsync_v2(second, first, 4096, stream));
    ok!(cuMemcpyDtoHAsync_v2(memory, second, 4096, stream));
    ok!(cuLaunchHostFunc(stream, Some(nothing), std::ptr::null_mut()));
    let graph = end(stream)?;
    expect_equal("nodes", nodes(graph)?, 4)?;
    run(graph, stream)?;
    // SAFETY: pinned memory of this size, which no work touches any more.
    let bytes = unsafe { std::slice::from_raw_parts(memory.cast::<u8>(), 4096) };
    expect_equal("content", bytes, &[7; 4096][..])
}

fn to_graph() -> Result {
    gpu::start()?;
    gpu::needs_driver(12030)?;
    let (count, stream, address) =
        (gpu::function(kernels::BASIC, "count")?, gpu::stream()?, gpu::upload(&[0_u32])?);
    let (mut graph, mut root) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuGraphCreate(&raw mut graph, 0));
    ok!(cuGraphAddEmptyNode(&raw mut root, graph, std::ptr::null(), 0));
    ok!(cuStreamBeginCaptureToGraph(stream, graph, &raw const root, std::ptr::null(), 1, 0));
    gpu::launch(count, 1, 8, stream, &[address])?;
    expect_equal("the graph at the end", end(stream)?, graph)?;
    expect_equal("nodes", nodes(graph)?, 2)?;
    run(graph, stream)?;
    gpu::expect_content(address, &[8_u32])
}

fn pool_memory() -> Result {
    gpu::start()?;
    let (stream, memory) = (gpu::stream()?, gpu::pinned(4096)?);
    let mut address = 0;
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    ok!(cuMemAllocAsync(&raw mut address, 4096, stream));
    ok!(cuMemsetD8Async(address, 3, 4096, stream));
    ok!(cuMemcpyDtoHAsync_v2(memory, address, 4096, stream));
    ok!(cuMemFreeAsync(address, stream));
    let graph = end(stream)?;
    expect_equal("nodes", nodes(graph)?, 4)?;
    run(graph, stream)?;
    // SAFETY: pinned memory of this size, which no work touches any more.
    let bytes = unsafe { std::slice::from_raw_parts(memory.cast::<u8>(), 4096) };
    expect_equal("content", bytes, &[3; 4096][..])
}
