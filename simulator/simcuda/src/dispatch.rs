//! Every handler that exists, by the name of its entry point. What is not named here is not supported.

#[allow(dead_code, unused_variables, reason = "a handler below takes the place of its stub")]
mod stubs {
    use cuda_abi::types::*;

    use crate::error::Result;

    macro_rules! stub {
        ($( fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) = $public:literal since $since:literal, $class:ident
            $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
         $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
            $(
                pub(crate) unsafe fn $name($($arg: $ty),*) -> Result {
                    Err(cuda_abi::sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)
                }
            )*
        };
    }

    cuda_abi::entry_points!(stub);
}

// A name that is imported by name goes before one that comes by the glob.
pub(crate) use stubs::*;

// Process, errors, symbols.
pub(crate) use crate::proc_address::{
    cuDriverGetVersion, cuGetErrorName, cuGetErrorString, cuGetExportTable, cuGetProcAddress,
    cuGetProcAddress_v2,
};
pub(crate) use crate::process::cuInit;

// Contexts.
pub(crate) use crate::context::{
    cuCtxCreate_v2, cuCtxCreate_v3, cuCtxCreate_v4, cuCtxDestroy_v2, cuCtxGetApiVersion, cuCtxGetCacheConfig,
    cuCtxGetCurrent, cuCtxGetDevice, cuCtxGetDevice_v2, cuCtxGetFlags, cuCtxGetId, cuCtxGetLimit,
    cuCtxGetSharedMemConfig, cuCtxPopCurrent_v2, cuCtxPushCurrent_v2, cuCtxResetPersistingL2Cache,
    cuCtxSetCacheConfig, cuCtxSetCurrent, cuCtxSetFlags, cuCtxSetLimit, cuCtxSetSharedMemConfig,
    cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxReset_v2,
    cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxSetFlags_v2,
};

// Memory.
pub(crate) use crate::memory::{
    cuCtxDisablePeerAccess, cuCtxEnablePeerAccess, cuDeviceCanAccessPeer, cuDeviceGetDefaultMemPool,
    cuDeviceGetMemPool, cuDeviceGetP2PAttribute, cuDeviceSetMemPool, cuIpcCloseMemHandle, cuIpcGetMemHandle,
    cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, cuMemAddressFree, cuMemAddressReserve, cuMemAdvise,
    cuMemAdvise_v2, cuMemAlloc_v2, cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemAllocHost_v2,
    cuMemAllocManaged, cuMemAllocPitch_v2, cuMemCreate, cuMemExportToShareableHandle, cuMemFree_v2,
    cuMemFreeAsync, cuMemFreeHost, cuMemGetAccess, cuMemGetAddressRange_v2, cuMemGetAllocationGranularity,
    cuMemGetAllocationPropertiesFromHandle, cuMemGetDefaultMemPool, cuMemGetHandleForAddressRange,
    cuMemGetInfo_v2, cuMemGetMemPool, cuMemHostAlloc, cuMemHostGetDevicePointer_v2, cuMemHostGetFlags,
    cuMemHostRegister_v2, cuMemHostUnregister, cuMemImportFromShareableHandle, cuMemMap, cuMemPoolCreate,
    cuMemPoolDestroy, cuMemPoolGetAccess, cuMemPoolGetAttribute, cuMemPoolSetAccess, cuMemPoolSetAttribute,
    cuMemPoolTrimTo, cuMemPrefetchAsync, cuMemPrefetchAsync_v2, cuMemRangeGetAttribute,
    cuMemRangeGetAttributes, cuMemRelease, cuMemRetainAllocationHandle, cuMemSetAccess, cuMemSetMemPool,
    cuMemUnmap, cuPointerGetAttribute, cuPointerGetAttributes, cuPointerSetAttribute,
};
pub(crate) use crate::memory::{
    cuMemPoolExportPointer, cuMemPoolExportToShareableHandle, cuMemPoolImportFromShareableHandle,
    cuMemPoolImportPointer,
};
pub(crate) use crate::memory::{
    cuMulticastAddDevice, cuMulticastBindAddr, cuMulticastBindAddr_v2, cuMulticastBindMem,
    cuMulticastBindMem_v2, cuMulticastCreate, cuMulticastGetGranularity, cuMulticastUnbind,
};

// Streams, events.
pub(crate) use crate::stream::{
    cuCtxGetStreamPriorityRange, cuCtxRecordEvent, cuCtxSynchronize, cuCtxSynchronize_v2, cuCtxWaitEvent,
    cuEventCreate, cuEventDestroy_v2, cuEventElapsedTime, cuEventElapsedTime_v2, cuEventQuery, cuEventRecord,
    cuEventRecordWithFlags, cuEventSynchronize, cuIpcGetEventHandle, cuIpcOpenEventHandle, cuLaunchHostFunc,
    cuLaunchHostFunc_v2, cuStreamAddCallback, cuStreamAttachMemAsync, cuStreamBatchMemOp,
    cuStreamBatchMemOp_v2, cuStreamBeginCapture, cuStreamBeginCapture_v2, cuStreamBeginCaptureToGraph,
    cuStreamCopyAttributes, cuStreamCreate, cuStreamCreateWithPriority, cuStreamDestroy_v2,
    cuStreamEndCapture, cuStreamGetAttribute, cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2,
    cuStreamGetCaptureInfo_v3, cuStreamGetCtx, cuStreamGetCtx_v2, cuStreamGetDevice, cuStreamGetFlags,
    cuStreamGetGreenCtx, cuStreamGetId, cuStreamGetPriority, cuStreamIsCapturing, cuStreamQuery,
    cuStreamSetAttribute, cuStreamSynchronize, cuStreamUpdateCaptureDependencies,
    cuStreamUpdateCaptureDependencies_v2, cuStreamWaitEvent, cuStreamWaitValue32, cuStreamWaitValue32_v2,
    cuStreamWaitValue64, cuStreamWaitValue64_v2, cuStreamWriteValue32, cuStreamWriteValue32_v2,
    cuStreamWriteValue64, cuStreamWriteValue64_v2, cuThreadExchangeStreamCaptureMode,
};

// Copies, fills and graphs.
pub(crate) use crate::graph::{
    cuDeviceGetGraphMemAttribute, cuDeviceGraphMemTrim, cuDeviceSetGraphMemAttribute,
    cuGraphAddBatchMemOpNode, cuGraphAddChildGraphNode, cuGraphAddDependencies, cuGraphAddDependencies_v2,
    cuGraphAddEmptyNode, cuGraphAddEventRecordNode, cuGraphAddEventWaitNode, cuGraphAddHostNode,
    cuGraphAddKernelNode, cuGraphAddKernelNode_v2, cuGraphAddMemAllocNode, cuGraphAddMemFreeNode,
    cuGraphAddMemcpyNode, cuGraphAddMemsetNode, cuGraphAddNode, cuGraphAddNode_v2, cuGraphAddNode_v3,
    cuGraphBatchMemOpNodeGetParams, cuGraphBatchMemOpNodeSetParams, cuGraphChildGraphNodeGetGraph,
    cuGraphClone, cuGraphCreate, cuGraphDebugDotPrint, cuGraphDestroy, cuGraphDestroyNode,
    cuGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeSetEvent, cuGraphEventWaitNodeGetEvent,
    cuGraphEventWaitNodeSetEvent, cuGraphExecBatchMemOpNodeSetParams, cuGraphExecChildGraphNodeSetParams,
    cuGraphExecDestroy, cuGraphExecEventRecordNodeSetEvent, cuGraphExecEventWaitNodeSetEvent,
    cuGraphExecGetFlags, cuGraphExecGetId, cuGraphExecHostNodeSetParams, cuGraphExecKernelNodeSetParams,
    cuGraphExecKernelNodeSetParams_v2, cuGraphExecMemcpyNodeSetParams, cuGraphExecMemsetNodeSetParams,
    cuGraphExecNodeSetParams, cuGraphExecUpdate, cuGraphExecUpdate_v2, cuGraphGetEdges, cuGraphGetEdges_v2,
    cuGraphGetId, cuGraphGetNodes, cuGraphGetRootNodes, cuGraphHostNodeGetParams, cuGraphHostNodeSetParams,
    cuGraphInstantiate_v2, cuGraphInstantiateWithFlags, cuGraphInstantiateWithParams,
    cuGraphKernelNodeGetParams, cuGraphKernelNodeGetParams_v2, cuGraphKernelNodeSetParams,
    cuGraphKernelNodeSetParams_v2, cuGraphLaunch, cuGraphMemAllocNodeGetParams, cuGraphMemFreeNodeGetParams,
    cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeSetParams, cuGraphMemsetNodeGetParams,
    cuGraphMemsetNodeSetParams, cuGraphNodeFindInClone, cuGraphNodeGetContainingGraph,
    cuGraphNodeGetDependencies, cuGraphNodeGetDependencies_v2, cuGraphNodeGetDependentNodes,
    cuGraphNodeGetDependentNodes_v2, cuGraphNodeGetEnabled, cuGraphNodeGetLocalId, cuGraphNodeGetParams,
    cuGraphNodeGetToolsId, cuGraphNodeGetType, cuGraphNodeSetEnabled, cuGraphNodeSetParams,
    cuGraphNodeSetParams_v2, cuGraphReleaseUserObject, cuGraphRemoveDependencies,
    cuGraphRemoveDependencies_v2, cuGraphRetainUserObject, cuGraphUpload, cuUserObjectCreate,
    cuUserObjectRelease, cuUserObjectRetain,
};
pub(crate) use crate::transfer::{
    cuMemcpy, cuMemcpy2D_v2, cuMemcpy2DAsync_v2, cuMemcpy2DUnaligned_v2, cuMemcpy3D_v2, cuMemcpy3DAsync_v2,
    cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_v2, cuMemcpy3DPeer, cuMemcpy3DPeerAsync,
    cuMemcpy3DWithAttributesAsync, cuMemcpyAsync, cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2, cuMemcpyDtoD_v2,
    cuMemcpyDtoDAsync_v2, cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2,
    cuMemcpyPeer, cuMemcpyPeerAsync, cuMemcpyWithAttributesAsync, cuMemsetD2D8_v2, cuMemsetD2D8Async,
    cuMemsetD2D16_v2, cuMemsetD2D16Async, cuMemsetD2D32_v2, cuMemsetD2D32Async, cuMemsetD8_v2,
    cuMemsetD8Async, cuMemsetD16_v2, cuMemsetD16Async, cuMemsetD32_v2, cuMemsetD32Async,
};

// Modules, libraries, launches, devices.
pub(crate) use crate::device::{
    cuDeviceComputeCapability, cuDeviceGet, cuDeviceGetAttribute, cuDeviceGetByPCIBusId, cuDeviceGetCount,
    cuDeviceGetExecAffinitySupport, cuDeviceGetHostAtomicCapabilities, cuDeviceGetName, cuDeviceGetPCIBusId,
    cuDeviceGetProperties, cuDeviceGetTexture1DLinearMaxWidth, cuDeviceGetUuid, cuDeviceGetUuid_v2,
    cuDeviceTotalMem_v2, cuProfilerStart, cuProfilerStop,
};
pub(crate) use crate::module::{
    cuFuncGetAttribute, cuFuncGetModule, cuFuncGetName, cuFuncGetParamCount, cuFuncGetParamInfo,
    cuFuncIsLoaded, cuFuncLoad, cuFuncSetAttribute, cuFuncSetBlockShape, cuFuncSetCacheConfig,
    cuFuncSetSharedMemConfig, cuFuncSetSharedSize, cuKernelGetAttribute, cuKernelGetFunction,
    cuKernelGetLibrary, cuKernelGetName, cuKernelGetParamCount, cuKernelGetParamInfo, cuKernelSetAttribute,
    cuKernelSetCacheConfig, cuLaunch, cuLaunchCooperativeKernel, cuLaunchGrid, cuLaunchGridAsync,
    cuLaunchKernel, cuLaunchKernelEx, cuLibraryEnumerateKernels, cuLibraryGetGlobal, cuLibraryGetKernel,
    cuLibraryGetKernelCount, cuLibraryGetManaged, cuLibraryGetModule, cuLibraryGetUnifiedFunction,
    cuLibraryLoadData, cuLibraryLoadFromFile, cuLibraryUnload, cuLinkAddData_v2, cuLinkAddFile_v2,
    cuLinkComplete, cuLinkCreate_v2, cuLinkDestroy, cuModuleEnumerateFunctions, cuModuleGetFunction,
    cuModuleGetFunctionCount, cuModuleGetGlobal_v2, cuModuleGetLoadingMode, cuModuleGetSurfRef,
    cuModuleGetTexRef, cuModuleLoad, cuModuleLoadData, cuModuleLoadDataEx, cuModuleLoadFatBinary,
    cuModuleUnload, cuOccupancyAvailableDynamicSMemPerBlock, cuOccupancyMaxActiveBlocksPerMultiprocessor,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cuOccupancyMaxActiveClusters,
    cuOccupancyMaxPotentialBlockSize, cuOccupancyMaxPotentialBlockSizeWithFlags,
    cuOccupancyMaxPotentialClusterSize, cuParamSetSize, cuParamSetf, cuParamSeti, cuParamSetv,
};

// Checkpoint.
pub(crate) use crate::checkpoint::{
    cuCheckpointOperationComplete, cuCheckpointProcessCheckpoint, cuCheckpointProcessGetRestoreThreadId,
    cuCheckpointProcessGetState, cuCheckpointProcessLock, cuCheckpointProcessRestore,
    cuCheckpointProcessUnlock,
};
