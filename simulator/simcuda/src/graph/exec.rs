//! Executable graphs: snapshots of a graph, and their launches.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_abi::sys::{self, CUgraphInstantiateResult, CUresult};
use cuda_abi::types::{CUgraph, CUgraphExec, CUgraphNode, CUstream, c_char};
use parking_lot::{Condvar, Mutex};

use super::edge::Edge;
use super::operation::Operation;
use super::user_object::Reference;
use super::{Graph, INVALID, Node, NodeId, fresh_id, graph_by_handle, node_by_handle};
use crate::context::{self, Context};
use crate::error::{Error, Result, write_if_wanted, write_out};
use crate::handle::Table;
use crate::process;
use crate::stream::{self, Event, Work};
use crate::transfer::layout;

// CUDA_GRAPH_INSTANTIATE_FLAG_…
const AUTO_FREE: u64 =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH.0 as u64;
const UPLOAD: u64 = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD.0 as u64;
const DEVICE_LAUNCH: u64 = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.0 as u64;
const NODE_PRIORITY: u64 =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0 as u64;

/// A graph that can be launched.
pub(super) struct Exec {
    handle: usize,
    id: u32,
    flags: u64,
    /// The graph of which this is the only executable, as it has memory nodes; else 0.
    sole_of: usize,
    /// What the next launch runs: launches that are under way keep what they have.
    pub(super) nodes: Mutex<Arc<[ExecNode]>>,
    /// Held while a launch is numbered and submitted, so that both are in the same order.
    launch: Mutex<()>,
    launches: Mutex<Launches>,
    finished: Condvar,
    /// Keeps the graph's user objects alive.
    _objects: Vec<Reference>,
}

/// The launches that are not done, by number.
#[derive(Default)]
struct Launches {
    last: u64,
    open: BTreeSet<u64>,
}

/// A node in an executable. Nodes of child graphs stand right before the child's own node.
#[derive(Clone)]
pub(super) struct ExecNode {
    /// The node of the graph that was instantiated.
    pub(super) id: NodeId,
    pub(super) operation: Operation,
    /// Places of the nodes that it comes after.
    pub(super) after: Vec<usize>,
    pub(super) is_enabled: bool,
}

static EXECS: Table<Exec> = Table::new();

/// The live executable of a handle.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for NULL and for an invalid or destroyed handle.
pub(super) fn by_handle(handle: CUgraphExec) -> Result<Arc<Exec>> {
    process::machine()?;
    EXECS.get(handle as usize).ok_or(INVALID)
}

/// The nodes of a graph, child graphs unfolded.
///
/// # Errors
/// A node of a cycle.
pub(super) fn unfold(graph: &Graph) -> std::result::Result<Vec<ExecNode>, NodeId> {
    let mut unfolded: Vec<(NodeId, Operation, Vec<NodeId>)> = Vec::new();
    unfold_into(graph, &[], &mut unfolded);
    let places: HashMap<NodeId, usize> =
        unfolded.iter().enumerate().map(|(place, (id, ..))| (*id, place)).collect();
    let nodes: Vec<ExecNode> = unfolded
        .into_iter()
        .map(|(id, operation, after)| {
            let after = after.iter().map(|before| places[before]).collect();
            ExecNode { id, operation, after, is_enabled: true }
        })
        .collect();
    match order(&nodes, None) {
        order if order.len() == nodes.len() => Ok(nodes),
        order => {
            let ordered: BTreeSet<usize> = order.into_iter().collect();
            let place = (0..nodes.len()).find(|place| !ordered.contains(place));
            Err(place.map_or(NodeId(0), |place| nodes[place].id))
        }
    }
}

/// Adds the nodes of a graph that comes after the nodes `entry`. A child's nodes come after what the child
/// comes after, and the child itself after the last of them.
fn unfold_into(graph: &Graph, entry: &[NodeId], unfolded: &mut Vec<(NodeId, Operation, Vec<NodeId>)>) {
    let nodes = graph.nodes.lock().clone();
    for (id, node) in nodes {
        let mut after: Vec<NodeId> = node.after.keys().copied().collect();
        if after.is_empty() {
            after.extend(entry);
        }
        if let Operation::Child(child) = &node.operation {
            unfold_into(child, &after, unfolded);
            after.extend(Graph::leaves(&child.nodes.lock()));
        }
        unfolded.push((id, node.operation, after));
    }
}

/// A topological order; a pseudo-random one if there is a seed. Nodes of cycles, and those after them, are not
/// in it.
pub(super) fn order(nodes: &[ExecNode], seed: Option<u64>) -> Vec<usize> {
    let mut later = vec![Vec::new(); nodes.len()];
    let mut missing: Vec<usize> = nodes.iter().map(|node| node.after.len()).collect();
    for (place, node) in nodes.iter().enumerate() {
        for before in &node.after {
            later[*before].push(place);
        }
    }
    let mut ready: BTreeSet<usize> = (0..nodes.len()).filter(|place| missing[*place] == 0).collect();
    let mut order = Vec::with_capacity(nodes.len());
    let mut random = seed.map(fastrand::Rng::with_seed);
    while let Some(first) = ready.first().copied() {
        let place = match &mut random {
            Some(random) => *ready.iter().nth(random.usize(..ready.len())).unwrap_or(&first),
            None => first,
        };
        ready.remove(&place);
        order.push(place);
        for next in &later[place] {
            missing[*next] -= 1;
            if missing[*next] == 0 {
                ready.insert(*next);
            }
        }
    }
    order
}

// ---- instantiation ----

/// Why a graph cannot be instantiated.
struct Refusal {
    error: Error,
    result: CUgraphInstantiateResult,
    node: Option<NodeId>,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, result: CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_ERROR, node: None }
    }
}

fn instantiate(graph: CUgraph, flags: u64, allowed: u64) -> std::result::Result<Arc<Exec>, Refusal> {
    let graph = graph_by_handle(graph)?;
    if flags & !(allowed | DEVICE_LAUNCH) != 0 {
        return Err(INVALID.into());
    }
    if flags & DEVICE_LAUNCH != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED.into());
    }
    let nodes = unfold(&graph).map_err(|node| Refusal {
        error: INVALID,
        result: CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE,
        node: Some(node),
    })?;
    let sole_of = if graph.has_memory_nodes() { graph.handle } else { 0 };
    if sole_of != 0 && EXECS.all().iter().any(|exec| exec.sole_of == sole_of) {
        return Err(INVALID.into());
    }
    let objects = graph.objects.lock().clone();
    Ok(EXECS.insert_with(|handle| Exec {
        handle,
        id: fresh_id(),
        flags: flags & !UPLOAD,
        sole_of,
        nodes: Mutex::new(nodes.into()),
        launch: Mutex::new(()),
        launches: Mutex::new(Launches::default()),
        finished: Condvar::new(),
        _objects: objects,
    }))
}

pub(crate) unsafe fn cuGraphInstantiateWithFlags(
    out: *mut CUgraphExec,
    graph: CUgraph,
    flags: u64,
) -> Result {
    if out.is_null() {
        return Err(INVALID);
    }
    let exec = instantiate(graph, flags, AUTO_FREE | NODE_PRIORITY).map_err(|refusal| refusal.error)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, exec.handle as CUgraphExec) }
}

/// The call of CUDA 11, which reports the error as text.
pub(crate) unsafe fn cuGraphInstantiate_v2(
    out: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    log_bytes: usize,
) -> Result {
    if out.is_null() {
        return Err(INVALID);
    }
    let (result, node, text) = match instantiate(graph, 0, 0) {
        Ok(exec) => (Ok(exec), None, ""),
        Err(refusal) => {
            let text =
                if refusal.node.is_some() { "the node is part of a cycle" } else { "invalid argument" };
            (Err(refusal.error), refusal.node, text)
        }
    };
    // SAFETY: `error_node` is the caller's out parameter; NULL means that it is not wanted.
    unsafe { write_if_wanted(error_node, node.map_or(std::ptr::null_mut(), NodeId::handle)) };
    if !log.is_null() && log_bytes > 0 {
        let len = text.len().min(log_bytes - 1);
        // SAFETY: the caller's buffer has `log_bytes`, of which the text and its NUL are no more.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), log, len) };
        // SAFETY: as above.
        unsafe { write_out(log.wrapping_add(len), 0) }?;
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, result?.handle as CUgraphExec) }
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct InstantiateParams {
    flags: u64,
    upload_stream: usize,
    error_node: usize,
    result: u32,
}

const _: () = assert!(size_of::<InstantiateParams>() == size_of::<sys::CUDA_GRAPH_INSTANTIATE_PARAMS>());

pub(crate) unsafe fn cuGraphInstantiateWithParams(
    out: *mut CUgraphExec,
    graph: CUgraph,
    params: *mut sys::CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> Result {
    if out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: NULL or the caller's structure, with its enum as an integer.
    let mut reported = unsafe { layout::read(params.cast::<InstantiateParams>()) }?;
    let (flags, upload_stream) = (reported.flags, reported.upload_stream as CUstream);
    let result = instantiate(graph, flags, AUTO_FREE | NODE_PRIORITY | UPLOAD);
    (reported.result, reported.error_node) = match &result {
        Ok(_) => (CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS as u32, 0),
        Err(refusal) => (refusal.result as u32, refusal.node.map_or(0, |node| node.0)),
    };
    // SAFETY: as above.
    unsafe { write_out(params.cast(), reported) }?;
    let exec = result.map_err(|refusal| refusal.error)?;
    if flags & UPLOAD != 0
        && let Err(error) = upload(upload_stream)
    {
        EXECS.remove(exec.handle);
        return Err(error);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, exec.handle as CUgraphExec) }
}

/// Launches under way continue.
pub(crate) unsafe fn cuGraphExecDestroy(exec: CUgraphExec) -> Result {
    by_handle(exec)?;
    let exec = EXECS.remove(exec as usize).ok_or(INVALID)?;
    // Destructors of the program may run here, under no lock.
    drop(exec);
    Ok(())
}

pub(crate) unsafe fn cuGraphExecGetFlags(exec: CUgraphExec, flags: *mut u64) -> Result {
    let exec = by_handle(exec)?;
    // SAFETY: `flags` is the caller's out parameter.
    unsafe { write_out(flags, exec.flags) }
}

pub(crate) unsafe fn cuGraphExecGetId(exec: CUgraphExec, id: *mut u32) -> Result {
    let exec = by_handle(exec)?;
    // SAFETY: `id` is the caller's out parameter.
    unsafe { write_out(id, exec.id) }
}

impl Exec {
    /// The index here of the node of the instantiated graph.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it is none, or is no longer in the graph.
    pub(super) fn place_of(&self, node: CUgraphNode) -> Result<usize> {
        let (_, id) = node_by_handle(node)?;
        self.nodes.lock().iter().position(|node| node.id == id).ok_or(INVALID)
    }

    /// Replaces nodes for launches to come.
    pub(super) fn replace(&self, nodes: Vec<ExecNode>) {
        let replaced = std::mem::replace(&mut *self.nodes.lock(), nodes.into());
        drop(replaced);
    }
}

/// Disabled nodes do nothing until they are enabled again.
pub(crate) unsafe fn cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, is_enabled: u32) -> Result {
    let exec = by_handle(exec)?;
    let place = exec.place_of(node)?;
    let mut nodes = exec.nodes.lock().to_vec();
    if !can_be_disabled(&nodes[place]) || is_enabled > 1 {
        return Err(INVALID);
    }
    nodes[place].is_enabled = is_enabled != 0;
    exec.replace(nodes);
    Ok(())
}

pub(crate) unsafe fn cuGraphNodeGetEnabled(exec: CUgraphExec, node: CUgraphNode, out: *mut u32) -> Result {
    let exec = by_handle(exec)?;
    let place = exec.place_of(node)?;
    let node = exec.nodes.lock()[place].clone();
    if !can_be_disabled(&node) {
        return Err(INVALID);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, u32::from(node.is_enabled)) }
}

/// CUDA driver API reference, cuGraphNodeSetEnabled.
fn can_be_disabled(node: &ExecNode) -> bool {
    matches!(node.operation, Operation::Kernel(_) | Operation::Fill { .. } | Operation::Copy(_))
}

// ---- launches ----

/// One launch of an executable graph: a snapshot of its nodes.
pub(crate) struct GraphRun {
    exec: Arc<Exec>,
    nodes: Arc<[ExecNode]>,
    number: u64,
    context: Arc<Context>,
    is_done: AtomicBool,
}

impl GraphRun {
    /// Runs every node, behind all earlier launches of the executable.
    ///
    /// # Errors
    /// The first error of a node; the nodes after it do not run.
    pub(crate) fn run(&self, _device: i32) -> Result {
        let mut launches = self.exec.launches.lock();
        while launches.open.first().is_some_and(|first| *first < self.number) {
            // An earlier launch may be another context's, and never end.
            self.context.check()?;
            self.exec.finished.wait_for(&mut launches, stream::CONTEXT_POLL_INTERVAL);
        }
        drop(launches);
        let result = self.run_nodes();
        self.finish();
        result
    }

    fn run_nodes(&self) -> Result {
        if self.exec.flags & AUTO_FREE != 0 {
            for allocation in self.allocations() {
                allocation.unmap_if_mapped()?;
            }
        }
        let jitter = process::machine()?.config.jitter;
        let seed = jitter.map(|seed| seed ^ (u64::from(self.exec.id) << 32) ^ self.number);
        for place in order(&self.nodes, seed) {
            let node = &self.nodes[place];
            // Other work may have made the context fail meanwhile.
            self.context.check()?;
            if node.is_enabled {
                node.operation.run(&self.context)?;
            }
        }
        Ok(())
    }

    fn allocations(&self) -> impl Iterator<Item = &Arc<super::allocation::Allocation>> {
        self.nodes.iter().filter_map(|node| match &node.operation {
            Operation::Allocate(allocation) => Some(allocation),
            _ => None,
        })
    }

    /// The events that nodes wait for: the launch as a whole comes after them.
    pub(crate) fn waits(&self) -> impl Iterator<Item = &Arc<Event>> {
        self.nodes.iter().filter_map(|node| match &node.operation {
            Operation::Wait(event) => Some(event),
            _ => None,
        })
    }

    /// The events that nodes record: they are reached when the launch is done.
    pub(crate) fn records(&self) -> impl Iterator<Item = &Arc<Event>> {
        self.nodes.iter().filter_map(|node| match &node.operation {
            Operation::Record(event) => Some(event),
            _ => None,
        })
    }

    /// The nodes as a graph for a child node: what a launch becomes in a stream's capture.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there are memory nodes.
    pub(super) fn to_graph(&self) -> Result<Arc<Graph>> {
        let node = |(number, node): (u32, &ExecNode)| {
            // The content of a child's node is unfolded.
            let operation = match &node.operation {
                Operation::Child(_) => Operation::Empty,
                _ if !node.is_enabled => Operation::Empty,
                other => other.clone(),
            };
            let after = node.after.iter().map(|place| (self.nodes[*place].id, Edge::default())).collect();
            (node.id, Node { operation, after, original: None, number })
        };
        Graph::from_snapshot((0..).zip(self.nodes.iter()).map(node).collect())
    }

    fn finish(&self) {
        if !self.is_done.swap(true, Ordering::AcqRel) {
            self.exec.launches.lock().open.remove(&self.number);
            self.exec.finished.notify_all();
        }
    }
}

impl Drop for GraphRun {
    /// A launch that was dropped, or became a node, does not hold later ones up.
    fn drop(&mut self) {
        self.finish();
    }
}

pub(crate) unsafe fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> Result {
    let exec = by_handle(exec)?;
    let context = context::current()?;
    let _in_order = exec.launch.lock();
    let nodes = Arc::clone(&exec.nodes.lock());
    let number = {
        let mut launches = exec.launches.lock();
        launches.last += 1;
        let number = launches.last;
        launches.open.insert(number);
        number
    };
    let is_done = AtomicBool::new(false);
    let run = Arc::new(GraphRun { exec: Arc::clone(&exec), nodes, number, context, is_done });
    let has_memory = exec.sole_of != 0;
    if has_memory {
        check_memory(&run)?;
    }
    stream::submit(stream, Work::Graph(Arc::clone(&run)))?;
    if has_memory {
        note_memory(&run);
    }
    Ok(())
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if an earlier launch left memory that this one would allocate, or did not leave
/// what this one would free.
fn check_memory(run: &GraphRun) -> Result {
    for node in run.nodes.iter() {
        if let Operation::Free(claim) = &node.operation
            && !claim.allocation.is_left()
            && !run.allocations().any(|own| Arc::ptr_eq(own, &claim.allocation))
        {
            return Err(INVALID);
        }
    }
    for allocation in run.allocations() {
        if allocation.is_left() && run.exec.flags & AUTO_FREE == 0 {
            return Err(INVALID);
        }
    }
    Ok(())
}

/// Notes what the launch leaves allocated.
fn note_memory(run: &GraphRun) {
    for allocation in run.allocations() {
        allocation.set_left(true);
    }
    for node in run.nodes.iter() {
        if let Operation::Free(claim) = &node.operation {
            claim.allocation.set_left(false);
        }
    }
}

/// There is nothing to bring to the device before a launch.
pub(crate) unsafe fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) -> Result {
    by_handle(exec)?;
    upload(stream)
}

fn upload(stream: CUstream) -> Result {
    context::current()?;
    stream::submit(stream, Work::Empty)
}
