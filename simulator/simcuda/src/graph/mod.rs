//! Graphs: nodes of work with dependencies, built by hand or by a stream's capture, and their executables.
//!
//! A [`Graph`] holds nodes, each with its [`Operation`] and the nodes that it comes after. Instantiation
//! (`exec`) takes a snapshot of it, child graphs unfolded, that launches and updates (`update`) work on; a
//! launch is a [`GraphRun`] in a stream's order. Conditional nodes, semaphores of other APIs and launches by
//! the device are not there.

mod allocation;
mod build;
mod edge;
mod exec;
mod operation;
mod params;
mod query;
mod update;
mod user_object;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use cuda_abi::sys::CUresult;
use cuda_abi::types::{CUgraph, CUgraphNode};
use parking_lot::Mutex;

use crate::error::Result;
use crate::handle::{self, Table};
use crate::process;
use crate::stream::Work;

pub(crate) use allocation::{
    cuDeviceGetGraphMemAttribute, cuDeviceGraphMemTrim, cuDeviceSetGraphMemAttribute,
};
pub(crate) use build::{
    cuGraphAddBatchMemOpNode, cuGraphAddChildGraphNode, cuGraphAddDependencies, cuGraphAddDependencies_v2,
    cuGraphAddEmptyNode, cuGraphAddEventRecordNode, cuGraphAddEventWaitNode, cuGraphAddHostNode,
    cuGraphAddKernelNode, cuGraphAddKernelNode_v2, cuGraphAddMemAllocNode, cuGraphAddMemFreeNode,
    cuGraphAddMemcpyNode, cuGraphAddMemsetNode, cuGraphAddNode, cuGraphAddNode_v2, cuGraphAddNode_v3,
    cuGraphClone, cuGraphCreate, cuGraphDestroy, cuGraphDestroyNode, cuGraphRemoveDependencies,
    cuGraphRemoveDependencies_v2,
};
use edge::Edge;
pub(crate) use exec::{
    GraphRun, cuGraphExecDestroy, cuGraphExecGetFlags, cuGraphExecGetId, cuGraphInstantiate_v2,
    cuGraphInstantiateWithFlags, cuGraphInstantiateWithParams, cuGraphLaunch, cuGraphNodeGetEnabled,
    cuGraphNodeSetEnabled, cuGraphUpload,
};
use operation::Operation;
pub(crate) use params::{
    cuGraphBatchMemOpNodeGetParams, cuGraphBatchMemOpNodeSetParams, cuGraphChildGraphNodeGetGraph,
    cuGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeSetEvent, cuGraphEventWaitNodeGetEvent,
    cuGraphEventWaitNodeSetEvent, cuGraphHostNodeGetParams, cuGraphHostNodeSetParams,
    cuGraphKernelNodeGetParams, cuGraphKernelNodeGetParams_v2, cuGraphKernelNodeSetParams,
    cuGraphKernelNodeSetParams_v2, cuGraphMemAllocNodeGetParams, cuGraphMemFreeNodeGetParams,
    cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeSetParams, cuGraphMemsetNodeGetParams,
    cuGraphMemsetNodeSetParams, cuGraphNodeGetParams, cuGraphNodeSetParams, cuGraphNodeSetParams_v2,
};
pub(crate) use query::{
    cuGraphDebugDotPrint, cuGraphGetEdges, cuGraphGetEdges_v2, cuGraphGetId, cuGraphGetNodes,
    cuGraphGetRootNodes, cuGraphNodeFindInClone, cuGraphNodeGetContainingGraph, cuGraphNodeGetDependencies,
    cuGraphNodeGetDependencies_v2, cuGraphNodeGetDependentNodes, cuGraphNodeGetDependentNodes_v2,
    cuGraphNodeGetLocalId, cuGraphNodeGetToolsId, cuGraphNodeGetType,
};
pub(crate) use update::{
    cuGraphExecBatchMemOpNodeSetParams, cuGraphExecChildGraphNodeSetParams,
    cuGraphExecEventRecordNodeSetEvent, cuGraphExecEventWaitNodeSetEvent, cuGraphExecHostNodeSetParams,
    cuGraphExecKernelNodeSetParams, cuGraphExecKernelNodeSetParams_v2, cuGraphExecMemcpyNodeSetParams,
    cuGraphExecMemsetNodeSetParams, cuGraphExecNodeSetParams, cuGraphExecUpdate, cuGraphExecUpdate_v2,
};
pub(crate) use user_object::{
    cuGraphReleaseUserObject, cuGraphRetainUserObject, cuUserObjectCreate, cuUserObjectRelease,
    cuUserObjectRetain,
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// A node: its handle as a number. Later nodes have greater ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(pub(crate) usize);

impl NodeId {
    pub(crate) fn handle(self) -> CUgraphNode {
        self.0 as CUgraphNode
    }
}

/// A graph under construction.
pub(crate) struct Graph {
    handle: usize,
    /// What cuGraphGetId and the DOT output call it; unlike the handle it counts from 1.
    id: u32,
    /// It is the content of a child node, which it lives and dies with.
    is_embedded: bool,
    nodes: Mutex<BTreeMap<NodeId, Node>>,
    /// How many nodes there have been.
    numbers: AtomicU32,
    objects: Mutex<Vec<user_object::Reference>>,
}

#[derive(Clone)]
struct Node {
    operation: Operation,
    after: BTreeMap<NodeId, Edge>,
    /// The node that this one was cloned from.
    original: Option<NodeId>,
    /// What cuGraphNodeGetLocalId and the DOT output call it.
    number: u32,
}

static GRAPHS: Table<Graph> = Table::new();
/// The graph of each node.
static NODES: Table<Weak<Graph>> = Table::new();
static NEXT_ID: AtomicU32 = AtomicU32::new(1);

/// A number for a graph or an executable, never the same twice.
fn fresh_id() -> u32 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// The live graph of a handle.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for NULL and for an invalid or destroyed handle.
pub(crate) fn graph_by_handle(handle: CUgraph) -> Result<Arc<Graph>> {
    process::machine()?;
    GRAPHS.get(handle as usize).ok_or(INVALID)
}

/// The node of a handle and the graph that it is in.
///
/// # Errors
/// As [`graph_by_handle`].
pub(crate) fn node_by_handle(handle: CUgraphNode) -> Result<(Arc<Graph>, NodeId)> {
    process::machine()?;
    let graph = NODES.get(handle as usize).and_then(|graph| graph.upgrade()).ok_or(INVALID)?;
    Ok((graph, NodeId(handle as usize)))
}

impl Graph {
    /// An empty graph with a handle of its own; it lives until it is destroyed.
    pub(crate) fn create() -> Arc<Self> {
        Self::with_nodes(BTreeMap::new(), false)
    }

    fn with_nodes(nodes: BTreeMap<NodeId, Node>, is_embedded: bool) -> Arc<Self> {
        let numbers = nodes.values().map(|node| node.number + 1).max().unwrap_or(0);
        let graph = GRAPHS.insert_with(|handle| Self {
            handle,
            id: fresh_id(),
            is_embedded,
            nodes: Mutex::new(nodes),
            numbers: AtomicU32::new(numbers),
            objects: Mutex::new(Vec::new()),
        });
        for id in graph.nodes.lock().keys() {
            NODES.insert(id.0, Arc::new(Arc::downgrade(&graph)));
        }
        graph
    }

    pub(crate) fn handle(&self) -> CUgraph {
        self.handle as CUgraph
    }

    /// Takes the handles of the graph, its nodes and their child graphs out of use.
    pub(crate) fn destroy(&self) {
        GRAPHS.remove(self.handle);
        let nodes = std::mem::take(&mut *self.nodes.lock());
        for (id, node) in &nodes {
            discard(*id, node);
        }
        let objects = std::mem::take(&mut *self.objects.lock());
        // Destructors of the program run here, under no lock.
        drop(objects);
    }

    /// Adds a node that runs after `after`. Used by a stream's capture.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a dependency that is not a node of this graph.
    pub(crate) fn add(self: &Arc<Self>, work: Work, after: &[NodeId]) -> Result<NodeId> {
        let after = after.iter().map(|id| (*id, Edge::default())).collect();
        self.add_operation(Operation::captured(work, self)?, after)
    }

    fn add_operation(
        self: &Arc<Self>,
        operation: Operation,
        after: BTreeMap<NodeId, Edge>,
    ) -> Result<NodeId> {
        let mut nodes = self.nodes.lock();
        for (id, edge) in &after {
            edge.check(nodes.get(id).ok_or(INVALID)?)?;
        }
        let id = NodeId(handle::fresh());
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        nodes.insert(id, Node { operation, after, original: None, number });
        NODES.insert(id.0, Arc::new(Arc::downgrade(self)));
        Ok(id)
    }

    /// What a node does.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the node is missing.
    fn operation(&self, id: NodeId) -> Result<Operation> {
        self.nodes.lock().get(&id).map(|node| node.operation.clone()).ok_or(INVALID)
    }

    /// Gives a node other parameters; its kind stays.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the node is missing or of another kind.
    fn set_operation(&self, id: NodeId, operation: Operation) -> Result {
        let mut nodes = self.nodes.lock();
        let node =
            nodes.get_mut(&id).filter(|node| node.operation.kind() == operation.kind()).ok_or(INVALID)?;
        let replaced = std::mem::replace(&mut node.operation, operation);
        drop(nodes);
        if let Operation::Child(child) = replaced {
            child.destroy();
        }
        Ok(())
    }

    /// A copy with nodes of its own.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there are memory nodes, whose addresses cannot be had twice.
    fn duplicate(&self, is_embedded: bool) -> Result<Arc<Self>> {
        let nodes = self.nodes.lock().clone();
        let copy = Self::with_nodes(duplicate_nodes(nodes)?, is_embedded);
        let objects = self.objects.lock().clone();
        *copy.objects.lock() = objects;
        Ok(copy)
    }

    /// A graph for a child node, of the nodes that an executable has now.
    ///
    /// # Errors
    /// As [`Self::duplicate`].
    fn from_snapshot(nodes: BTreeMap<NodeId, Node>) -> Result<Arc<Self>> {
        Ok(Self::with_nodes(duplicate_nodes(nodes)?, true))
    }

    /// The graph's node of a handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it is none, or one of another graph.
    pub(crate) fn node_id(&self, handle: CUgraphNode) -> Result<NodeId> {
        let id = NodeId(handle as usize);
        if self.nodes.lock().contains_key(&id) { Ok(id) } else { Err(INVALID) }
    }

    /// Whether a node here or in a child graph allocates or frees.
    fn has_memory_nodes(&self) -> bool {
        self.nodes.lock().values().any(|node| match &node.operation {
            Operation::Allocate(_) | Operation::Free(_) => true,
            Operation::Child(child) => child.has_memory_nodes(),
            _ => false,
        })
    }

    /// The nodes that no other node of the graph comes after.
    fn leaves(nodes: &BTreeMap<NodeId, Node>) -> BTreeSet<NodeId> {
        let mut leaves: BTreeSet<NodeId> = nodes.keys().copied().collect();
        for id in nodes.values().flat_map(|node| node.after.keys()) {
            leaves.remove(id);
        }
        leaves
    }
}

/// The same nodes with new identities.
fn duplicate_nodes(nodes: BTreeMap<NodeId, Node>) -> Result<BTreeMap<NodeId, Node>> {
    let fresh: BTreeMap<NodeId, NodeId> = nodes.keys().map(|id| (*id, NodeId(handle::fresh()))).collect();
    let mut copies = BTreeMap::new();
    for (id, node) in nodes {
        let operation = match node.operation {
            Operation::Allocate(_) | Operation::Free(_) => return Err(INVALID),
            Operation::Child(child) => Operation::Child(child.duplicate(true)?),
            other => other,
        };
        let after = node.after.into_iter().map(|(before, edge)| (fresh[&before], edge)).collect();
        copies.insert(fresh[&id], Node { operation, after, original: Some(id), number: node.number });
    }
    Ok(copies)
}

/// Takes the handles of a node that was taken out of its graph, and of its child graph, out of use.
fn discard(id: NodeId, node: &Node) {
    NODES.remove(id.0);
    if let Operation::Child(child) = &node.operation {
        child.destroy();
    }
}
