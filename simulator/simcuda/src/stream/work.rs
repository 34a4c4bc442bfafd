//! Pieces of asynchronous work: what a stream runs and what a graph's nodes are.

use std::sync::Arc;

use super::event::Event;
use super::host::{Callback, HostFunction};
use super::memop::MemoryOp;
use crate::context::Context;
use crate::error::Result;
use crate::graph::GraphRun;
use crate::memory;
use crate::module::Kernel;
use crate::transfer::{Copy, Fill};

/// One piece of work in a stream's order.
#[derive(Clone)]
pub(crate) enum Work {
    Kernel(Arc<Kernel>),
    Copy(Copy),
    Fill(Fill),
    Graph(Arc<GraphRun>),
    /// Memory of a pool becomes usable, or goes back to its pool, at this point of the order.
    Allocate(u64),
    Free(u64),
    Host(HostFunction),
    MemoryOps(Arc<[MemoryOp]>),
    /// The nodes of a graph that record an event, and that wait for one.
    Record(Arc<Event>),
    Wait(Arc<Event>),
    Empty,
}

impl Work {
    /// Does the work on the calling thread.
    ///
    /// # Errors
    /// The sticky error of the context.
    pub(crate) fn run(&self, context: &Arc<Context>) -> Result {
        let device = context.device.ordinal;
        match self {
            Self::Kernel(kernel) => kernel.run(device),
            Self::Copy(copy) => copy.run(device),
            Self::Fill(fill) => fill.run(device),
            Self::Graph(graph) => graph.run(device),
            Self::Allocate(address) => memory::pool_activate(*address),
            Self::Free(address) => memory::pool_release(*address),
            Self::Host(function) => {
                function.call();
                Ok(())
            }
            Self::MemoryOps(ops) => ops.iter().try_for_each(|op| op.run(context)),
            Self::Record(event) => {
                event.stamp();
                Ok(())
            }
            // Its place in the order is kept by the launch as a whole, which waits for the event.
            Self::Wait(_) | Self::Empty => Ok(()),
        }
    }
}

/// An entry of a stream's queue.
pub(super) enum Task {
    Work(Work),
    /// The time of an event's record, if it is still this one.
    Stamp(Arc<Event>, u64),
    Callback(Callback),
    #[cfg(test)]
    Panic,
}

impl Task {
    /// Runs it, unless the context has failed: then only callbacks run, with the error.
    pub(super) fn run(self, context: &Arc<Context>) -> Result {
        match self {
            Self::Callback(callback) => callback.call(context.check()),
            _ if context.check().is_err() => {}
            Self::Work(work) => work.run(context)?,
            #[cfg(test)]
            Self::Panic => panic!("as the test wants"),
            Self::Stamp(event, record) => event.stamp_record(record),
        }
        Ok(())
    }
}
