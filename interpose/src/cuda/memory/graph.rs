//! Makes room for memory that graphs allocate (cuGraphAddMemAllocNode, captured cuMemAllocAsync).
//!
//! The driver allocates that memory itself and does not know what our pools and slabs hold unused: without us that
//! memory would have been free. So unused memory is given back when a graph needs it:
//!
//! - Before a graph that allocates is made executable, uploaded, or launched for the first time, if its device has
//!   less free than the graph's nodes allocate. A driver makes that memory at one of these calls (CUDA C++
//!   programming guide, "Graph Memory Nodes", "Physical Memory Footprint"), and keeps it until cuDeviceGraphMemTrim.
//! - When a call ran out of memory without any effect: making a node, capturing one, making a graph
//!   executable, uploading it. It is retried once. A launch is not: what of it had been submitted nobody can
//!   tell. But the program's own next try may succeed.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_ulonglong};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use cuda_abi::sys::{self, CUgraphEdgeData, CUgraphNodeParams};
use cuda_abi::types::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUdevice, CUgraph, CUgraphExec, CUgraphNode,
    CUgraphNodeType, CUresult, CUstream, CUstreamCaptureStatus,
};

use super::reclaim::make_room;
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::objects::{self, ObjectKind};
use crate::cuda::result::{OUT_OF_MEMORY, SUCCESS};
use crate::cuda::shared::Shared;
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{context, driver};
use cuda_abi::layout::PoolProperties;

const ALLOCATION: CUgraphNodeType = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC as CUgraphNodeType;
const UPLOAD: c_ulonglong =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD.0 as c_ulonglong;

/// How much a graph's nodes allocate on each device, in bytes.
type Needs = BTreeMap<c_int, u64>;

/// Whether the program has ever created a node that allocates: most programs have not and pay nothing.
static HAS_NODES: AtomicBool = AtomicBool::new(false);

/// Executable graphs that allocate.
static EXECUTABLES: Shared<BTreeMap<usize, Executable>> = Shared::new(BTreeMap::new());
/// How many of them may still need memory.
static WAITING: AtomicUsize = AtomicUsize::new(0);

struct Executable {
    needs: Needs,
    /// The driver has allocated its memory.
    is_served: bool,
}

fn count_waiting(executables: &BTreeMap<usize, Executable>) {
    WAITING.store(executables.values().filter(|executable| !executable.is_served).count(), Relaxed);
}

/// Gives unused memory back on devices; whether there was any.
fn make_room_on(devices: impl IntoIterator<Item = c_int>) -> bool {
    relaxed(|| devices.into_iter().fold(false, |is_any, device| make_room(device) | is_any))
}

/// Makes a call and retries it once, if it ran out of memory without any effect and the devices had unused memory.
fn retried(
    call: impl Fn() -> CUresult,
    has_done_nothing: impl FnOnce() -> bool,
    devices: impl FnOnce() -> Vec<c_int>,
) -> CUresult {
    let result = call();
    if result == OUT_OF_MEMORY && is_started() && has_done_nothing() && make_room_on(devices()) {
        call()
    } else {
        result
    }
}

// ---- nodes ----

/// How many nodes a graph has. NULL instead of an array asks for that (CUDA driver API reference, cuGraphGetNodes).
fn node_count(graph: CUgraph) -> Option<usize> {
    // SAFETY: the call writes to a local variable; a graph that is none is an error and not more.
    driver::ask(0, |count| unsafe { driver::cuGraphGetNodes(graph, null_mut(), count) }).ok()
}

/// Makes a node, which allocates if it is given a device.
fn adding(graph: CUgraph, device: Option<c_int>, add: impl Fn() -> CUresult) -> CUresult {
    let Some(device) = device.filter(|_| is_started()) else { return add() };
    let before = node_count(graph);
    let result = retried(add, || before.is_some() && before == node_count(graph), || vec![device]);
    if result == SUCCESS {
        HAS_NODES.store(true, Relaxed);
    }
    result
}

/// The device of a node that allocates, for parameters of any node.
///
/// # Safety
/// The parameters are NULL or the program's.
unsafe fn device_of(parameters: *const CUgraphNodeParams) -> Option<c_int> {
    if parameters.is_null() {
        return None;
    }
    // SAFETY: the structure begins with the type of the node, an `int`.
    let kind = unsafe { parameters.cast::<CUgraphNodeType>().read_unaligned() };
    if kind != ALLOCATION {
        return None;
    }
    // SAFETY: the field of the program's structure.
    let pool = unsafe { &raw const (*parameters).__bindgen_anon_1.alloc.poolProps };
    // SAFETY: for a node of this type it is there; ours has the same layout, with plain numbers.
    Some(unsafe { pool.cast::<PoolProperties>().read_unaligned() }.location.id)
}

handlers! {
    fn cuGraphAddMemAllocNode(
        node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize,
        parameters: *mut CUDA_MEM_ALLOC_NODE_PARAMS
    ) |call| {
        // SAFETY: NULL, or the program's structure, which begins with the pool's properties; ours has the same layout,
        // with plain numbers.
        let pool =
            (!parameters.is_null()).then(|| unsafe { parameters.cast::<PoolProperties>().read_unaligned() });
        adding(graph, pool.map(|pool| pool.location.id), call)
    }

    fn cuGraphAddNode(
        node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize,
        parameters: *mut CUgraphNodeParams
    ) |call| {
        // SAFETY: the parameters are those of our own caller.
        adding(graph, unsafe { device_of(parameters) }, call)
    }

    fn cuGraphAddNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize, parameters: *mut CUgraphNodeParams
    ) |call| {
        // SAFETY: the parameters are those of our own caller.
        adding(graph, unsafe { device_of(parameters) }, call)
    }
}

/// The parameters are the same.
pub(crate) use cuGraphAddNode_v2 as cuGraphAddNode_v3;

/// Makes a call that allocates in a stream, which becomes a node if the stream is being captured. One that fails
/// half-way ends the capture.
pub(super) fn capturing(
    stream: CUstream,
    device: impl FnOnce() -> Option<c_int>,
    allocate: impl Fn() -> CUresult,
) -> CUresult {
    let result = retried(allocate, || is_capturing(stream), || relaxed(device).into_iter().collect());
    if result == SUCCESS && is_started() && is_capturing(stream) {
        HAS_NODES.store(true, Relaxed);
    }
    result
}

/// Whether a stream is being captured, and nothing has gone wrong with that.
fn is_capturing(stream: CUstream) -> bool {
    const ACTIVE: CUstreamCaptureStatus =
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as CUstreamCaptureStatus;
    // SAFETY: the call writes to a local variable; the stream is the program's.
    driver::ask(0, |status| unsafe { driver::cuStreamIsCapturing(stream, status) }) == Ok(ACTIVE)
}

// ---- graphs ----

/// What the nodes of a graph allocate. Some may share memory, so it may be less that they need. Child graphs rarely
/// have such nodes and are ignored.
fn needs_of(graph: CUgraph) -> Needs {
    let mut needs = Needs::new();
    if !HAS_NODES.load(Relaxed) || !is_started() {
        return needs;
    }
    for node in nodes_of(graph) {
        // SAFETY: the call writes to a local variable, and the node is of a graph that the program is using.
        let kind = driver::ask(0, |kind| unsafe { driver::cuGraphNodeGetType(node, kind) });
        if kind == Ok(ALLOCATION)
            && let Some((device, bytes)) = allocation(node)
        {
            *needs.entry(device).or_default() += bytes;
        }
    }
    needs
}

fn nodes_of(graph: CUgraph) -> Vec<CUgraphNode> {
    let mut count = node_count(graph).unwrap_or(0);
    let mut nodes: Vec<CUgraphNode> = vec![null_mut(); count];
    // SAFETY: the array has room for so many nodes.
    let result = unsafe { driver::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) };
    nodes.truncate(if result == SUCCESS { count } else { 0 });
    nodes
}

/// The device of a node that allocates, and how much, in bytes.
fn allocation(node: CUgraphNode) -> Option<(c_int, u64)> {
    let mut parameters = MaybeUninit::<CUDA_MEM_ALLOC_NODE_PARAMS>::zeroed();
    // SAFETY: there is room for what the driver writes, and the node is of this type.
    let result = unsafe { driver::cuGraphMemAllocNodeGetParams(node, parameters.as_mut_ptr()) };
    if result != SUCCESS {
        return None;
    }
    // SAFETY: the structure begins with the pool's properties; ours has the same layout, with plain numbers.
    let pool = unsafe { parameters.as_ptr().cast::<PoolProperties>().read() };
    // SAFETY: a field that the driver has written.
    let bytes = unsafe { &raw const (*parameters.as_ptr()).bytesize };
    // SAFETY: as above.
    Some((pool.location.id, unsafe { bytes.read() } as u64))
}

/// Gives back unused memory on the devices that have less free than is needed.
fn provide(needs: &Needs) {
    if needs.is_empty() {
        return;
    }
    let is_short = |(device, bytes): &(&c_int, &u64)| free_bytes(**device).is_some_and(|free| free < **bytes);
    let short: Vec<c_int> = relaxed(|| needs.iter().filter(is_short).map(|(device, _)| *device).collect());
    if !short.is_empty() {
        make_room_on(short);
    }
}

fn free_bytes(device: c_int) -> Option<u64> {
    let context = context::on_device(device)?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are local variables.
    let ask = || unsafe { driver::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    let result = context::within(context.context, ask).ok()?;
    (result == SUCCESS).then_some(free as u64)
}

/// Makes a graph executable.
///
/// # Safety
/// `out` is what the driver writes if the call succeeds, or NULL.
unsafe fn instantiating(
    out: *mut CUgraphExec,
    graph: CUgraph,
    is_uploaded: bool,
    instantiate: impl Fn() -> CUresult,
) -> CUresult {
    let needs = needs_of(graph);
    provide(&needs);
    // SAFETY: the caller vouches for it.
    let made = || unsafe { objects::made(ObjectKind::GraphExec, None, instantiate(), out) };
    let result = retried(made, || !is_uploaded, context::devices);
    if result == SUCCESS && !needs.is_empty() && !out.is_null() {
        // SAFETY: the driver has written it.
        let executable = unsafe { out.read() } as usize;
        let mut executables = EXECUTABLES.lock();
        executables.insert(executable, Executable { needs, is_served: is_uploaded });
        count_waiting(&executables);
    }
    result
}

/// An executable graph is about to be given its memory by the driver, if it has none yet.
fn first_use(executable: CUgraphExec) {
    let needs = {
        let mut executables = EXECUTABLES.lock();
        let Some(found) = executables.get_mut(&(executable as usize)).filter(|found| !found.is_served) else {
            return;
        };
        found.is_served = true;
        let needs = found.needs.clone();
        count_waiting(&executables);
        needs
    };
    provide(&needs);
}

handlers! {
    fn cuGraphInstantiate_v2(
        out: *mut CUgraphExec, graph: CUgraph, node: *mut CUgraphNode, log: *mut c_char, bytes: usize
    ) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { instantiating(out, graph, false, call) }
    }

    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { instantiating(out, graph, flags & UPLOAD != 0, call) }
    }

    fn cuGraphInstantiateWithParams(
        out: *mut CUgraphExec, graph: CUgraph, parameters: *mut CUDA_GRAPH_INSTANTIATE_PARAMS
    ) |call| {
        // SAFETY: NULL, or the program's structure, which begins with the flags.
        let flags = unsafe { parameters.cast::<c_ulonglong>().as_ref() };
        // SAFETY: the caller's out parameter.
        unsafe { instantiating(out, graph, flags.is_some_and(|flags| flags & UPLOAD != 0), call) }
    }

    fn cuGraphUpload(executable: CUgraphExec, stream: CUstream) |call| {
        if WAITING.load(Relaxed) > 0 {
            first_use(executable);
        }
        // What was uploaded already is not uploaded again, and nothing runs (CUDA driver API reference, cuGraphUpload).
        retried(call, || true, context::devices)
    }

    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) |call| {
        if WAITING.load(Relaxed) > 0 {
            first_use(executable);
        }
        let result = call();
        if result == OUT_OF_MEMORY && is_started() {
            make_room_on(context::devices());
        }
        result
    }

    fn cuGraphExecDestroy(executable: CUgraphExec) |call| {
        // Before the call: the driver may reuse the handle at once.
        let known = EXECUTABLES.lock().remove(&(executable as usize));
        let result = objects::destroyed(ObjectKind::GraphExec, executable as usize, call);
        if let Some(known) = known {
            let mut executables = EXECUTABLES.lock();
            if result != SUCCESS {
                executables.insert(executable as usize, known);
            }
            count_waiting(&executables);
        }
        result
    }

    /// The driver frees memory that no graph uses: the next launch needs it again.
    fn cuDeviceGraphMemTrim(device: CUdevice) |call| {
        let result = call();
        if result == SUCCESS {
            let mut executables = EXECUTABLES.lock();
            for executable in
                executables.values_mut().filter(|executable| executable.needs.contains_key(&device))
            {
                executable.is_served = false;
            }
            count_waiting(&executables);
        }
        result
    }
}
