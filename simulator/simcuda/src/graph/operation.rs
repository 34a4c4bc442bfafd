//! What nodes do, and how the driver's structures say it.

use std::ffi::c_void;
use std::sync::Arc;

use cuda_abi::sys::{self, CUgraphNodeType, CUmemorytype};
use cuda_abi::types::CUcontext;

use super::allocation::{self, Allocation, Claim};
use super::{Graph, INVALID};
use crate::context::{self, Context};
use crate::error::Result;
use crate::module::Kernel;
use crate::stream::{Event, HostFunction, MemoryOp, Work};
use crate::transfer::{self, Copy, Endpoint, Fill, Side};

/// What a node does.
#[derive(Clone)]
pub(super) enum Operation {
    Kernel(KernelNode),
    Copy(Arc<CopyNode>),
    Fill {
        fill: Fill,
        context: Arc<Context>,
    },
    Host(HostFunction),
    /// Runs a graph of its own; in an executable its nodes are unfolded and this one represents their end.
    Child(Arc<Graph>),
    Empty,
    Wait(Arc<Event>),
    Record(Arc<Event>),
    Allocate(Arc<Allocation>),
    Free(Arc<Claim>),
    MemoryOps(MemoryOpsNode),
}

#[derive(Clone)]
pub(super) struct KernelNode {
    pub(super) kernel: Arc<Kernel>,
    /// Where the values of its parameters lie: the result of cuGraphKernelNodeGetParams.
    pub(super) values: Arc<[*mut c_void]>,
}

pub(super) struct CopyNode {
    pub(super) copy: Copy,
    /// As the program gave it; made up for a copy that was captured.
    pub(super) params: sys::CUDA_MEMCPY3D,
    pub(super) context: Arc<Context>,
}

#[derive(Clone)]
pub(super) struct MemoryOpsNode {
    pub(super) ops: Arc<[MemoryOp]>,
    /// As the program gave them; none if they were captured.
    pub(super) params: Option<Arc<[sys::CUstreamBatchMemOpParams]>>,
    pub(super) context: Arc<Context>,
}

// SAFETY: the pointers lead into the kernel beside them, and only the program follows them.
unsafe impl Send for KernelNode {}
// SAFETY: as above.
unsafe impl Sync for KernelNode {}
// SAFETY: the pointers in the structures are the program's addresses, which nothing here follows.
unsafe impl Send for CopyNode {}
// SAFETY: as above.
unsafe impl Sync for CopyNode {}
// SAFETY: as above.
unsafe impl Send for MemoryOpsNode {}
// SAFETY: as above.
unsafe impl Sync for MemoryOpsNode {}

impl Operation {
    /// The node of a piece of work that a stream captured in the current context.
    ///
    /// # Errors
    /// Those of the current context; `CUDA_ERROR_INVALID_VALUE` for freeing what no node allocated.
    pub(super) fn captured(work: Work, graph: &Graph) -> Result<Self> {
        Ok(match work {
            Work::Kernel(kernel) => Self::Kernel(KernelNode::new(kernel)),
            Work::Copy(copy) => {
                let params = copy_params(&copy);
                Self::Copy(Arc::new(CopyNode { copy, params, context: context::current()? }))
            }
            Work::Fill(fill) => Self::Fill { fill, context: context::current()? },
            Work::Graph(run) => Self::Child(run.to_graph()?),
            Work::Host(function) => Self::Host(function),
            Work::MemoryOps(ops) => {
                Self::MemoryOps(MemoryOpsNode { ops, params: None, context: context::current()? })
            }
            Work::Record(event) => Self::Record(event),
            Work::Wait(event) => Self::Wait(event),
            Work::Empty => Self::Empty,
            Work::Allocate(address) => Self::Allocate(Allocation::captured(address, graph.handle)?),
            Work::Free(address) => Self::free(address, graph)?,
        })
    }

    pub(super) fn kind(&self) -> CUgraphNodeType {
        match self {
            Self::Kernel(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL,
            Self::Copy(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY,
            Self::Fill { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET,
            Self::Host(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST,
            Self::Child(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH,
            Self::Empty => CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY,
            Self::Wait(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            Self::Record(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            Self::Allocate(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Self::Free(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE,
            Self::MemoryOps(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
        }
    }

    /// Does it, in the node's own context or, where it has none, in that of the launch.
    ///
    /// # Errors
    /// The sticky error of the context.
    pub(super) fn run(&self, launch: &Arc<Context>) -> Result {
        match self {
            Self::Kernel(node) => Work::Kernel(Arc::clone(&node.kernel)).run(node.kernel.context()),
            Self::Copy(node) => node.copy.run(node.context.device.ordinal),
            Self::Fill { fill, context } => fill.run(context.device.ordinal),
            Self::Host(function) => Work::Host(*function).run(launch),
            Self::Record(event) => Work::Record(Arc::clone(event)).run(launch),
            Self::Wait(event) => Work::Wait(Arc::clone(event)).run(launch),
            Self::Allocate(allocation) => allocation.map(),
            Self::Free(claim) => claim.allocation.unmap(),
            Self::MemoryOps(node) => Work::MemoryOps(Arc::clone(&node.ops)).run(&node.context),
            Self::Child(_) | Self::Empty => Ok(()),
        }
    }

    /// A kernel node.
    ///
    /// # Errors
    /// As cuLaunchKernel; `CUDA_ERROR_INVALID_VALUE` for a function of another context than `context`, unless
    /// that is NULL.
    ///
    /// # Safety
    /// `params` is NULL or points to a structure, whose pointers are as for cuLaunchKernel.
    pub(super) unsafe fn kernel(params: *const sys::CUDA_KERNEL_NODE_PARAMS) -> Result<Self> {
        // SAFETY: NULL or valid, as the caller vouches; the structure holds no enums.
        let params = unsafe { params.as_ref() }.ok_or(INVALID)?;
        // A `CUkernel` may stand for the function, too.
        let function = if params.func.is_null() { params.kern.cast() } else { params.func };
        let grid = [params.gridDimX, params.gridDimY, params.gridDimZ];
        let block = [params.blockDimX, params.blockDimY, params.blockDimZ];
        let (shared, values, extra) = (params.sharedMemBytes, params.kernelParams, params.extra);
        // SAFETY: the caller vouches for the pointers in the structure.
        let kernel = unsafe { Kernel::from_params(function, grid, block, shared, values, extra) }?;
        if !params.ctx.is_null() && params.ctx as usize != kernel.context().handle {
            return Err(INVALID);
        }
        Ok(Self::Kernel(KernelNode::new(Arc::new(kernel))))
    }

    /// As [`Self::kernel`], with the structure of CUDA 11.
    ///
    /// # Errors
    /// As [`Self::kernel`].
    ///
    /// # Safety
    /// As [`Self::kernel`].
    pub(super) unsafe fn kernel_v1(params: *const sys::CUDA_KERNEL_NODE_PARAMS_v1) -> Result<Self> {
        // SAFETY: NULL or valid, as the caller vouches; the structure holds no enums.
        let params = unsafe { params.as_ref() }.ok_or(INVALID)?;
        let params = sys::CUDA_KERNEL_NODE_PARAMS {
            func: params.func,
            gridDimX: params.gridDimX,
            gridDimY: params.gridDimY,
            gridDimZ: params.gridDimZ,
            blockDimX: params.blockDimX,
            blockDimY: params.blockDimY,
            blockDimZ: params.blockDimZ,
            sharedMemBytes: params.sharedMemBytes,
            kernelParams: params.kernelParams,
            extra: params.extra,
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: the pointers are the caller's.
        unsafe { Self::kernel(&raw const params) }
    }

    /// A node that frees what an allocation node gave.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if none did, or it is freed already.
    pub(super) fn free(address: u64, graph: &Graph) -> Result<Self> {
        Ok(Self::Free(allocation::of_free(address)?.claim(graph.handle)?))
    }

    /// A copy node.
    ///
    /// # Errors
    /// As cuMemcpy3D, and those of the context.
    ///
    /// # Safety
    /// `params` is NULL or points to a structure.
    pub(super) unsafe fn copy(params: *const sys::CUDA_MEMCPY3D, context: CUcontext) -> Result<Self> {
        let context = context::given_or_current(context)?;
        // SAFETY: the caller vouches for it.
        let copy = unsafe { transfer::from_3d(params) }?;
        if !copy.is_empty() {
            transfer::check_copy(&copy, context.device.ordinal)?;
        }
        // SAFETY: not NULL, and its enums were found to be in range: the two calls above fail otherwise.
        let params = unsafe { *params };
        Ok(Self::Copy(Arc::new(CopyNode { copy, params, context })))
    }

    /// A fill node.
    ///
    /// # Errors
    /// As cuMemsetD2D8, and those of the context.
    ///
    /// # Safety
    /// `params` is NULL or points to a structure.
    pub(super) unsafe fn fill(
        params: *const sys::CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext,
    ) -> Result<Self> {
        let context = context::given_or_current(context)?;
        // SAFETY: NULL or valid, as the caller vouches; the structure holds integers only.
        let params = unsafe { params.as_ref() }.ok_or(INVALID)?;
        let fill = Fill {
            address: params.dst,
            value: params.value,
            element_bytes: params.elementSize as usize,
            width: params.width,
            height: params.height,
            pitch_bytes: params.pitch,
        };
        // An element of 0 bytes divides nothing.
        if !matches!(fill.element_bytes, 1 | 2 | 4) {
            return Err(INVALID);
        }
        if fill.width > 0 && fill.height > 0 {
            transfer::check_fill(&fill, context.device.ordinal)?;
        }
        Ok(Self::Fill { fill, context })
    }

    /// A node of stream-ordered memory operations.
    ///
    /// # Errors
    /// As cuStreamBatchMemOp, and those of the context.
    ///
    /// # Safety
    /// `params` is NULL or points to a structure, whose array is as long as it says.
    pub(super) unsafe fn memory_ops(params: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS) -> Result<Self> {
        // SAFETY: NULL or valid, as the caller vouches; the structure itself holds no enums.
        let params = unsafe { params.as_ref() }.ok_or(INVALID)?;
        let context = context::given_or_current(params.ctx)?;
        if params.flags != 0 || params.count == 0 {
            return Err(INVALID);
        }
        // SAFETY: the caller vouches for the array.
        let ops = unsafe { MemoryOp::from_params(params.paramArray, params.count, context.device.ordinal) }?;
        // SAFETY: the call above found the array to be there and its operations to be known ones.
        let array = unsafe { std::slice::from_raw_parts(params.paramArray, params.count as usize) };
        Ok(Self::MemoryOps(MemoryOpsNode { ops, params: Some(array.into()), context }))
    }
}

impl KernelNode {
    fn new(kernel: Arc<Kernel>) -> Self {
        let values = kernel.param_pointers().into();
        Self { kernel, values }
    }

    /// The parameters of the node; the array and the values live as long as the node has them.
    pub(super) fn params(&self) -> sys::CUDA_KERNEL_NODE_PARAMS {
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) =
            (self.kernel.grid(), self.kernel.block());
        sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.kernel.function(),
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: self.kernel.dynamic_shared_bytes(),
            kernelParams: self.values.as_ptr().cast_mut(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: self.kernel.context().handle as CUcontext,
        }
    }
}

/// The parameters of a fill node.
pub(super) fn fill_params(fill: &Fill) -> sys::CUDA_MEMSET_NODE_PARAMS {
    sys::CUDA_MEMSET_NODE_PARAMS {
        dst: fill.address,
        pitch: fill.pitch_bytes,
        value: fill.value,
        // 1, 2 or 4.
        elementSize: fill.element_bytes as u32,
        width: fill.width,
        height: fill.height,
    }
}

/// The parameters that make this copy.
fn copy_params(copy: &Copy) -> sys::CUDA_MEMCPY3D {
    let (from_type, from_host, from_device) = address(&copy.from);
    let (to_type, to_host, to_device) = address(&copy.to);
    sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: from_type,
        srcHost: from_host,
        srcDevice: from_device,
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: copy.from.pitch_bytes,
        srcHeight: copy.from.slice_rows,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: to_type,
        dstHost: to_host.cast_mut(),
        dstDevice: to_device,
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: copy.to.pitch_bytes,
        dstHeight: copy.to.slice_rows,
        WidthInBytes: copy.width_bytes,
        Height: copy.height,
        Depth: copy.depth,
    }
}

fn address(place: &Endpoint) -> (CUmemorytype, *const c_void, u64) {
    match place.side {
        Side::Host => (CUmemorytype::CU_MEMORYTYPE_HOST, place.address as *const _, 0),
        Side::Device => (CUmemorytype::CU_MEMORYTYPE_DEVICE, std::ptr::null(), place.address),
        Side::Unified => (CUmemorytype::CU_MEMORYTYPE_UNIFIED, std::ptr::null(), place.address),
    }
}
