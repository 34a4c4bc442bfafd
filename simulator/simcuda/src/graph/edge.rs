//! Dependencies between nodes.

use cuda_abi::sys::{self, CUgraphNodeType, CUresult};

use super::{INVALID, Node};
use crate::error::Result;

/// What an edge says beyond that one node comes after another. A launch here always waits until all of the
/// earlier node is done, which no port forbids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Edge {
    from_port: u8,
    kind: u8,
}

const PROGRAMMATIC: u8 = sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8;
/// The largest of the output ports of kernel nodes (`cuda.h`, CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER).
const LAST_PORT: u8 = 2;

impl Edge {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for what no node knows.
    pub(super) fn from_data(data: &sys::CUgraphEdgeData) -> Result<Self> {
        let reserved = data.reserved.iter().any(|byte| *byte != 0);
        if reserved || data.to_port != 0 || data.from_port > LAST_PORT || data.type_ > PROGRAMMATIC {
            return Err(INVALID);
        }
        Ok(Self { from_port: data.from_port, kind: data.type_ })
    }

    pub(super) fn data(self) -> sys::CUgraphEdgeData {
        sys::CUgraphEdgeData { from_port: self.from_port, to_port: 0, type_: self.kind, reserved: [0; 5] }
    }

    pub(super) fn is_default(self) -> bool {
        self == Self::default()
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if a node has no such port: kernels only have some.
    pub(super) fn check(self, from: &Node) -> Result {
        let is_kernel = from.operation.kind() == CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL;
        if self.is_default() || is_kernel { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
    }
}
