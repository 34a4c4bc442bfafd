//! Names the handler of each intercepted call. A handler gets the driver's function and the parameters; a call
//! without one is passed on.

mod passed {
    use cuda_abi::types::*;

    macro_rules! pass {
        ($( fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) = $public:literal since $since:literal, $class:ident
            $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
         $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
            $(
                #[allow(dead_code, reason = "a handler below takes its place")]
                #[inline(always)]
                pub(crate) unsafe fn $name(
                    real: unsafe extern "C" fn($($ty),*) -> CUresult,
                    $($arg: $ty),*
                ) -> CUresult {
                    // SAFETY: the parameters are those of our own caller.
                    unsafe { real($($arg),*) }
                }
            )*
        };
    }

    cuda_abi::entry_points!(pass);
}

// A name that is imported by name goes before one that comes by the glob.
pub(super) use passed::*;

pub(super) use super::context::{
    cuCtxAttach, cuCtxCreate_v2, cuCtxCreate_v3, cuCtxCreate_v4, cuCtxDestroy_v2, cuCtxDetach,
    cuCtxFromGreenCtx, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxRetain,
    cuGreenCtxCreate, cuGreenCtxDestroy,
};
pub(super) use super::init::cuInit;
pub(super) use super::memory::arena::{cuMemAlloc_v2, cuMemAllocPitch_v2, cuMemGetInfo_v2};
pub(super) use super::memory::attributes::{
    cuMemGetAddressRange_v2, cuPointerGetAttribute, cuPointerGetAttributes, cuPointerSetAttribute,
};
pub(super) use super::memory::free::cuMemFree_v2;
pub(super) use super::memory::graph::{cuDeviceGraphMemTrim, cuGraphAddMemAllocNode, cuGraphUpload};
pub(super) use super::memory::ipc::{
    cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2,
};
pub(super) use super::memory::multicast::calls::{
    cuMulticastAddDevice, cuMulticastBindAddr, cuMulticastBindAddr_v2, cuMulticastBindMem,
    cuMulticastBindMem_v2, cuMulticastCreate, cuMulticastUnbind,
};
pub(super) use super::memory::peer::{cuCtxDisablePeerAccess, cuCtxEnablePeerAccess};
pub(super) use super::memory::pool::calls::{
    cuCtxSynchronize, cuCtxSynchronize_v2, cuDeviceGetDefaultMemPool, cuDeviceGetMemPool, cuEventSynchronize,
    cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemGetDefaultMemPool, cuMemGetMemPool,
    cuMemPoolCreate, cuMemPoolDestroy, cuMemPoolGetAttribute, cuMemPoolSetAccess, cuMemPoolSetAttribute,
    cuMemPoolTrimTo, cuStreamSynchronize,
};
pub(super) use super::memory::pool::share_calls::{
    cuDeviceSetMemPool, cuMemPoolExportPointer, cuMemPoolExportToShareableHandle,
    cuMemPoolImportFromShareableHandle, cuMemPoolImportPointer, cuMemSetMemPool,
};
pub(super) use super::memory::reservations::{cuMemAddressFree, cuMemAddressReserve};
pub(super) use super::memory::vmm::{
    cuLogicalEndpointBindMem, cuMemCreate, cuMemExportToShareableHandle, cuMemGetAccess,
    cuMemGetAllocationPropertiesFromHandle, cuMemGetHandleForAddressRange, cuMemImportFromShareableHandle,
    cuMemMap, cuMemMapArrayAsync, cuMemRelease, cuMemRetainAllocationHandle, cuMemSetAccess, cuMemUnmap,
};
// These call the handlers of `memory::graph` and `objects`.
pub(super) use super::nccl::graph_calls::{
    cuGraphAddChildGraphNode, cuGraphAddNode, cuGraphAddNode_v2, cuGraphAddNode_v3, cuGraphClone,
    cuGraphDestroy, cuGraphExecDestroy, cuGraphExecUpdate, cuGraphExecUpdate_v2, cuGraphInstantiate_v2,
    cuGraphInstantiateWithFlags, cuGraphInstantiateWithParams, cuGraphLaunch,
};
pub(super) use super::objects::{
    cuDestroyExternalMemory, cuDestroyExternalSemaphore, cuEventCreate, cuEventDestroy_v2,
    cuExternalMemoryGetMappedBuffer, cuExternalMemoryGetMappedMipmappedArray, cuGraphCreate,
    cuGreenCtxStreamCreate, cuImportExternalMemory, cuImportExternalSemaphore, cuIpcGetEventHandle,
    cuIpcOpenEventHandle, cuLibraryGetManaged, cuLibraryLoadData, cuLibraryLoadFromFile, cuLibraryUnload,
    cuMemAllocManaged, cuMipmappedArrayDestroy, cuModuleGetGlobal_v2, cuModuleLoad, cuModuleLoadData,
    cuModuleLoadDataEx, cuModuleLoadFatBinary, cuModuleUnload, cuStreamCreate, cuStreamCreateWithPriority,
    cuStreamDestroy_v2, cuStreamEndCapture,
};
pub(super) use super::proc_address::{cuGetExportTable, cuGetProcAddress, cuGetProcAddress_v2};
pub(super) use super::stream_capture::{
    cuStreamBeginCapture, cuStreamBeginCapture_v2, cuStreamBeginCaptureToGraph, cuStreamBeginRecaptureToGraph,
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use cuda_abi::{Class, ENTRY_POINTS};

    /// What is virtualised or tracked by being kept out while the process is saved, and by nothing else.
    const ONLY_GATED: &[&str] = &[
        // Arrays go the driver's way.
        "cuArray3DCreate_v2",
        "cuArrayCreate_v2",
        "cuArrayDestroy",
        "cuArrayGetPlane",
        "cuMipmappedArrayCreate",
        "cuMipmappedArrayGetLevel",
        // The address of a variable, which goes the driver's way.
        "cuLibraryGetGlobal",
        // Host memory is the dump's.
        "cuMemAllocHost_v2",
        "cuMemFreeHost",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        // Of managed memory, which is an obstacle by itself.
        "cuMemAdvise",
        "cuMemAdvise_v2",
        // Memory that belongs to graphs goes the driver's way.
        "cuGraphAddMemFreeNode",
        // A pool's handle and its properties are the driver's; only its memory is ours.
        "cuMemPoolGetAccess",
    ];

    /// Whether a function is one of those that pass a call on.
    fn is_passed_on<T>(_: T) -> bool {
        std::any::type_name::<T>().contains("::handlers::passed::")
    }

    macro_rules! ask {
        ($( fn $name:ident $params:tt = $public:literal since $since:literal, $class:ident
            $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
         $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
            /// The rows whose calls are only passed on.
            fn passed_on() -> BTreeSet<&'static str> {
                let mut passed = BTreeSet::new();
                $( if is_passed_on(super::$name) { passed.insert(stringify!($name)); } )*
                passed
            }
        };
    }

    cuda_abi::entry_points!(ask);

    /// `launch` calls the driver without a handler.
    #[test]
    fn launches_have_no_handler() {
        assert!(passed_on().contains("cuLaunchKernel"));
    }

    /// A row that is to do something does something: that its handler was dropped shows here, and that the row itself
    /// was dropped or is of another class in `tests/entry_points.txt`.
    #[test]
    fn what_is_virtualised_or_tracked_has_a_handler() {
        let is_meant = |class| matches!(class, Some(Class::Virtualise | Class::Track));
        let meant = ENTRY_POINTS.iter().filter(|row| is_meant(row.class)).map(|row| row.symbol);
        let passed = passed_on();
        let without: BTreeSet<_> = meant.filter(|symbol| passed.contains(symbol)).collect();
        let gated: BTreeSet<_> = ONLY_GATED.iter().copied().collect();
        let lost: Vec<_> = without.difference(&gated).collect();
        let found: Vec<_> = gated.difference(&without).collect();
        assert!(lost.is_empty(), "without a handler: {lost:#?}");
        assert!(found.is_empty(), "with a handler, or of another class: {found:#?}");
    }
}
