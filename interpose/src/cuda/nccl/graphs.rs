//! Calls that were captured, and the launches of their graphs.
//!
//! A capture in a process that is a rank among others is one step: it may park where it begins, and ends with
//! cuStreamEndCapture. A call that is captured belongs to it and never parks, since a process with an open capture
//! cannot be saved. What was captured is copied with its graph, and each launch is a step with all of it.
//!
//! The GPU decides how often it launches the body of a conditional node. A process with calls in one cannot be saved.

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use ckpt_cut::rank::{Counts, Entry, InCall};
use cuda_abi::sys;
use cuda_abi::types::{CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureStatus};

use super::{calls, communicators, ranks, steps};
use crate::cuda::result::SUCCESS;
use crate::cuda::{driver, gate};

const ACTIVE: CUstreamCaptureStatus =
    sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as CUstreamCaptureStatus;

/// `CU_STREAM_PER_THREAD`: the one that is meant where 0 names a stream that captures.
const PER_THREAD: usize = 2;

/// What was captured, by the driver's IDs of captures and by handles.
pub(super) struct Graphs {
    captures: BTreeMap<u64, Counts>,
    of_graphs: BTreeMap<usize, Counts>,
    of_executables: BTreeMap<usize, Arc<Counts>>,
    /// The bodies of conditional nodes, with the graphs that have these nodes.
    bodies: BTreeMap<usize, usize>,
}

impl Graphs {
    pub fn new() -> Self {
        Self {
            captures: BTreeMap::new(),
            of_graphs: BTreeMap::new(),
            of_executables: BTreeMap::new(),
            bodies: BTreeMap::new(),
        }
    }

    /// Whether a conditional node launches calls.
    pub fn has_calls_in_bodies(&self) -> bool {
        self.bodies.keys().any(|body| self.of_graphs.contains_key(body))
    }

    /// Removes the bodies that end with a graph, as far as they have no calls, and returns them: their handles may become
    /// those of other graphs. One with calls stays, since an executable graph may have it.
    fn take_bodies_of(&mut self, graph: usize) -> Vec<(usize, usize)> {
        let is_its = |(body, parent): &(usize, usize)| *parent == graph && !self.of_graphs.contains_key(body);
        let bodies = self.bodies.iter().map(|(body, parent)| (*body, *parent));
        let mut taken: Vec<_> = bodies.filter(is_its).collect();
        self.bodies.retain(|body, parent| !taken.contains(&(*body, *parent)));
        for index in 0..taken.len() {
            let (body, _) = taken[index];
            taken.extend(self.take_bodies_of(body));
        }
        taken
    }
}

/// Number of captures that are steps.
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);
/// Whether there has ever been a graph, or an executable one, with calls.
static HAS_GRAPHS: AtomicBool = AtomicBool::new(false);
static HAS_EXECUTABLES: AtomicBool = AtomicBool::new(false);
/// Whether there has ever been a conditional node.
static HAS_BODIES: AtomicBool = AtomicBool::new(false);

/// Changes whenever an executable graph may have other calls: threads keep what they have looked up.
pub(super) static GENERATION: AtomicU64 = AtomicU64::new(0);

/// A capture in progress.
pub(crate) struct Recording {
    id: u64,
    _in_call: InCall<'static>,
}

impl Drop for Recording {
    fn drop(&mut self) {
        ranks().graphs.lock().captures.remove(&self.id);
        RECORDINGS.fetch_sub(1, AcqRel);
    }
}

/// A capture is about to begin: a step, if the process is a rank among others.
pub(crate) fn begin_capture() -> Option<InCall<'static>> {
    let begin = || ranks().clock.begin::<&Entry>(&[], calls::BEGIN_CAPTURE);
    communicators::uses_several_ranks().then(|| gate::outside(begin))
}

/// The capture has begun.
pub(crate) fn capture_begun(stream: CUstream, in_call: InCall<'static>) -> Option<Recording> {
    let id = capture_of(stream)?;
    ranks().graphs.lock().captures.insert(id, Counts::default());
    RECORDINGS.fetch_add(1, AcqRel);
    Some(Recording { id, _in_call: in_call })
}

/// The capture has ended with a graph.
pub(crate) fn captured(recording: &Recording, graph: CUgraph) {
    let mut graphs = ranks().graphs.lock();
    let counts = graphs.captures.remove(&recording.id).filter(|counts| !counts.is_empty());
    if let Some(counts) = counts {
        graphs.of_graphs.entry(graph as usize).or_default().add_all(&counts);
        HAS_GRAPHS.store(true, Release);
    }
}

/// A conditional node of a graph has these bodies.
pub(super) fn add_bodies(graph: CUgraph, bodies: &[CUgraph]) {
    if !bodies.is_empty() {
        let bodies = bodies.iter().map(|body| (*body as usize, graph as usize));
        ranks().graphs.lock().bodies.extend(bodies);
        HAS_BODIES.store(true, Release);
    }
}

/// The driver's ID of the capture that a stream belongs to.
fn capture_of(stream: CUstream) -> Option<u64> {
    let stream = if stream.is_null() { PER_THREAD as CUstream } else { stream };
    let (mut status, mut id) = (0, 0);
    let (none, nodes, edges) = (null_mut(), null_mut(), null_mut());
    // SAFETY: the call writes to local variables; NULL: nothing else is asked for.
    let asked = unsafe {
        driver::cuStreamGetCaptureInfo_v2(stream, &raw mut status, &raw mut id, none, nodes, null_mut())
    };
    let asked = if asked == SUCCESS {
        asked
    } else {
        // SAFETY: as above; newer drivers have this form only.
        unsafe {
            driver::cuStreamGetCaptureInfo_v3(
                stream,
                &raw mut status,
                &raw mut id,
                none,
                nodes,
                edges,
                null_mut(),
            )
        }
    };
    (asked == SUCCESS && status == ACTIVE).then_some(id)
}

/// Whether a call may belong to a capture.
#[inline]
pub(super) fn may_record() -> bool {
    RECORDINGS.load(Relaxed) > 0
}

/// Counts operations for the capture that their stream belongs to. False if there is none.
pub(super) fn record(stream: CUstream, step: &[(Arc<Entry>, u32)], call: u32) -> bool {
    let Some(id) = capture_of(stream) else { return false };
    let mut graphs = ranks().graphs.lock();
    let Some(counts) = graphs.captures.get_mut(&id) else { return false };
    step.iter().for_each(|(entry, operations)| counts.add(entry, *operations));
    // Under the lock: the capture is still in progress.
    ranks().clock.extend(step, call);
    true
}

fn counts_of(graph: CUgraph) -> Option<Counts> {
    if !HAS_GRAPHS.load(Acquire) {
        return None;
    }
    ranks().graphs.lock().of_graphs.get(&(graph as usize)).cloned()
}

/// What a graph has is added to another one.
pub(super) fn add(to: CUgraph, from: CUgraph) {
    if let Some(counts) = counts_of(from) {
        ranks().graphs.lock().of_graphs.entry(to as usize).or_default().add_all(&counts);
    }
}

/// What an executable graph has.
pub(super) fn counts_of_executable(executable: usize) -> Option<Arc<Counts>> {
    ranks().graphs.lock().of_executables.get(&executable).cloned()
}

/// Replaces what an executable graph has; returns what it had.
fn replace(executable: CUgraphExec, counts: Option<Arc<Counts>>) -> Option<Arc<Counts>> {
    let of_executables = &mut ranks().graphs.lock().of_executables;
    let before = match counts {
        Some(counts) => of_executables.insert(executable as usize, counts),
        None => Some(of_executables.remove(&(executable as usize))?),
    };
    GENERATION.fetch_add(1, AcqRel);
    before
}

/// What an executable graph has from now on.
pub(super) fn set(executable: CUgraphExec, graph: CUgraph) {
    match counts_of(graph) {
        Some(counts) => {
            replace(executable, Some(Arc::new(counts)));
            HAS_EXECUTABLES.store(true, Release);
        }
        None if HAS_EXECUTABLES.load(Acquire) => {
            replace(executable, None);
        }
        None => {}
    }
}

/// Begins a launch if the graph has calls.
#[inline]
pub(super) fn launch(executable: CUgraphExec, stream: CUstream) -> Option<InCall<'static>> {
    if !HAS_EXECUTABLES.load(Relaxed) {
        return None;
    }
    steps::launching(executable as usize, |counts| {
        if may_record() && record(stream, counts.step(), calls::GRAPH_LAUNCH) {
            return None;
        }
        let clock = &ranks().clock;
        clock
            .begin_at_once(counts.step(), calls::GRAPH_LAUNCH)
            .or_else(|| Some(gate::outside(|| clock.begin(counts.step(), calls::GRAPH_LAUNCH))))
    })
}

/// Destroys an executable graph: forgotten before, since the driver may reuse the handle at once.
pub(super) fn destroy_executable(executable: CUgraphExec, destroy: impl FnOnce() -> CUresult) -> CUresult {
    if !HAS_EXECUTABLES.load(Acquire) {
        return destroy();
    }
    let known = replace(executable, None);
    let result = destroy();
    if known.is_some() && result != SUCCESS {
        replace(executable, known);
    }
    result
}

/// As [`destroy_executable`], for a graph.
pub(super) fn destroy_graph(graph: CUgraph, destroy: impl FnOnce() -> CUresult) -> CUresult {
    if !HAS_GRAPHS.load(Acquire) && !HAS_BODIES.load(Acquire) {
        return destroy();
    }
    let (known, bodies) = {
        let mut graphs = ranks().graphs.lock();
        (graphs.of_graphs.remove(&(graph as usize)), graphs.take_bodies_of(graph as usize))
    };
    let result = destroy();
    if result != SUCCESS {
        let mut graphs = ranks().graphs.lock();
        graphs.of_graphs.extend(known.map(|counts| (graph as usize, counts)));
        graphs.bodies.extend(bodies);
    }
    result
}

#[cfg(test)]
mod tests {
    use ckpt_cut::{Member, Name, Role};

    use super::*;

    #[test]
    fn calls_in_the_body_of_a_conditional_node_are_an_obstacle() {
        let mut graphs = Graphs::new();
        let (body, other) = (8, 16);
        graphs.bodies.insert(body, 24);
        graphs.of_graphs.insert(other, Counts::default());
        assert!(!graphs.has_calls_in_bodies());
        graphs.of_graphs.insert(body, Counts::default());
        assert!(graphs.has_calls_in_bodies());
    }

    /// Another graph may get the handle of a body that has ended with the graph of its node.
    #[test]
    fn bodies_without_calls_end_with_their_graphs() {
        let mut graphs = Graphs::new();
        let (graph, body, inner, with_calls, other) = (8, 16, 24, 32, 40);
        graphs.bodies.extend([(body, graph), (inner, body), (with_calls, graph), (48, other)]);
        graphs.of_graphs.insert(with_calls, Counts::default());
        assert_eq!(graphs.take_bodies_of(graph), [(body, graph), (inner, body)]);
        assert_eq!(graphs.bodies, BTreeMap::from([(with_calls, graph), (48, other)]));
        graphs.of_graphs.insert(body, Counts::default());
        assert!(graphs.has_calls_in_bodies(), "those that an executable graph may have");
        graphs.of_graphs.remove(&with_calls);
        assert!(!graphs.has_calls_in_bodies());
    }

    #[test]
    fn a_launch_counts_what_its_graph_has_at_that_time() {
        let member = Member { communicator: Name::of_unique_ids(b"launches"), index: 0 };
        let entry = ranks().clock.register(member, Role::Communicator { awaits: None, alias: None });
        // No other test has handles like these.
        let (graph, executable) = ((&raw const member) as CUgraph, (&raw const entry) as CUgraphExec);
        let has = |operations| {
            let mut counts = Counts::default();
            counts.add(&entry, operations);
            ranks().graphs.lock().of_graphs.insert(graph as usize, counts);
            HAS_GRAPHS.store(true, Release);
            set(executable, graph);
        };
        let launched = || {
            let before = entry.sequence();
            let is_step = launch(executable, null_mut()).is_some();
            (is_step, entry.sequence() - before)
        };
        has(2);
        assert_eq!([launched(), launched()], [(true, 2); 2]);
        // As by cuGraphExecUpdate.
        has(3);
        assert_eq!([launched(), launched()], [(true, 3); 2]);
        destroy_executable(executable, || sys::CUresult::CUDA_ERROR_INVALID_VALUE as CUresult);
        assert_eq!(launched(), (true, 3), "it was not destroyed");
        destroy_executable(executable, || SUCCESS);
        assert_eq!([launched(), launched()], [(false, 0); 2]);
        has(1);
        assert_eq!(launched(), (true, 1), "another one with the same handle");
        destroy_executable(executable, || SUCCESS);
        destroy_graph(graph, || SUCCESS);
        ranks().clock.retire(&entry);
    }
}
