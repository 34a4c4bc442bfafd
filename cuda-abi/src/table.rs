//! The table of entry points.
//!
//! Sources: symbol names, versions and per-thread variants are those of `cuda.h`, `cudaTypedefs.h` and their
//! GL, EGL, VDPAU and profiler kin in CUDA 12.9 and 13.5; parameters are cudarc's, which a test compares.
//! What no header declares is exported by NVIDIA's libcuda.so.1 of 550.163, which another test compares.
//! Rows are in the order of `cuda.h`; within one public name the versions rise.

/// Calls the macro `$callback` with every entry point of the CUDA driver, in this form:
///
/// ```text
/// fn SYMBOL(PARAMETER: TYPE, ...) = "PUBLIC NAME" since VERSION, CLASS[, per_thread SYMBOL since VERSION];
/// ...
/// legacy SYMBOL = "PUBLIC NAME" since VERSION;
/// ...
/// ```
///
/// All `fn` rows come before all `legacy` rows. SYMBOL is the exact ELF name and PUBLIC NAME what
/// cuGetProcAddress is asked for. VERSION is the CUDA version (1000 * major + 10 * minor) from which
/// cuGetProcAddress hands the symbol out. CLASS is a [`Class`](crate::Class) in lower case. The `per_thread`
/// symbol has the same parameters and takes the calling thread's own default stream for stream 0. TYPEs are
/// those of [`types`](crate::types); every function returns [`CUresult`](crate::types::CUresult).
///
/// A `legacy` row is exported by the driver, but has no signature here: no program that was built for CUDA 11
/// or later asks for it, it takes types of a graphics library, or no header declares it. None has a per-thread
/// variant. An empty PUBLIC NAME says that the symbol is exported, but unknown to cuGetProcAddress.
///
/// A callback that writes the parameters a second time for the per-thread symbol matches them as one
/// `$parameters:tt` and takes them apart in a macro of its own, because a repetition cannot be used inside
/// an optional part that it does not drive.
#[macro_export]
macro_rules! entry_points {
    ($callback:path) => { $callback! {
        // Errors
        fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char) = "cuGetErrorString" since 6000, leave;
        fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char) = "cuGetErrorName" since 6000, leave;

        // Initialisation, version
        fn cuInit(Flags: c_uint) = "cuInit" since 2000, leave;
        fn cuDriverGetVersion(driverVersion: *mut c_int) = "cuDriverGetVersion" since 2020, leave;

        // Devices
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) = "cuDeviceGet" since 2000, leave;
        fn cuDeviceGetCount(count: *mut c_int) = "cuDeviceGetCount" since 2000, leave;
        fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice)
            = "cuDeviceGetName" since 2000, leave;
        fn cuDeviceGetUuid(uuid: *mut CUuuid, dev: CUdevice) = "cuDeviceGetUuid" since 9020, leave;
        fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice) = "cuDeviceGetUuid" since 11040, leave;
        fn cuDeviceGetLuid(luid: *mut c_char, deviceNodeMask: *mut c_uint, dev: CUdevice)
            = "cuDeviceGetLuid" since 10000, leave;
        fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) = "cuDeviceTotalMem" since 3020, leave;
        fn cuDeviceGetTexture1DLinearMaxWidth(
            maxWidthInElements: *mut usize, format: CUarray_format, numChannels: c_uint, dev: CUdevice
        ) = "cuDeviceGetTexture1DLinearMaxWidth" since 11010, leave;
        fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice)
            = "cuDeviceGetAttribute" since 2000, leave;
        fn cuDeviceGetHostAtomicCapabilities(
            capabilities: *mut c_uint, operations: *const CUatomicOperation, count: c_uint, dev: CUdevice
        ) = "cuDeviceGetHostAtomicCapabilities" since 13000, leave;
        fn cuDeviceGetNvSciSyncAttributes(nvSciSyncAttrList: *mut c_void, dev: CUdevice, flags: c_int)
            = "cuDeviceGetNvSciSyncAttributes" since 10020, leave;
        fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) = "cuDeviceSetMemPool" since 11020, track;
        fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, dev: CUdevice)
            = "cuDeviceGetMemPool" since 11020, track;
        fn cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice)
            = "cuDeviceGetDefaultMemPool" since 11020, track;
        fn cuDeviceGetExecAffinitySupport(pi: *mut c_int, type_: CUexecAffinityType, dev: CUdevice)
            = "cuDeviceGetExecAffinitySupport" since 11040, leave;
        fn cuDeviceGetProperties(prop: *mut CUdevprop, dev: CUdevice)
            = "cuDeviceGetProperties" since 2000, leave;
        fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: CUdevice)
            = "cuDeviceComputeCapability" since 2000, leave;

        // Virtual memory management
        fn cuFlushGPUDirectRDMAWrites(
            target: CUflushGPUDirectRDMAWritesTarget, scope: CUflushGPUDirectRDMAWritesScope
        ) = "cuFlushGPUDirectRDMAWrites" since 11030, leave;
        fn cuMemAddressReserve(
            ptr: *mut CUdeviceptr, size: usize, alignment: usize, addr: CUdeviceptr, flags: c_ulonglong
        ) = "cuMemAddressReserve" since 10020, track;
        fn cuMemAddressFree(ptr: CUdeviceptr, size: usize) = "cuMemAddressFree" since 10020, track;
        fn cuMemCreate(
            handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp,
            flags: c_ulonglong
        ) = "cuMemCreate" since 10020, track;
        fn cuMemRelease(handle: CUmemGenericAllocationHandle) = "cuMemRelease" since 10020, track;
        fn cuMemMap(
            ptr: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle,
            flags: c_ulonglong
        ) = "cuMemMap" since 10020, track;
        fn cuMemMapArrayAsync(mapInfoList: *mut CUarrayMapInfo, count: c_uint, hStream: CUstream)
            = "cuMemMapArrayAsync" since 11010, track, per_thread cuMemMapArrayAsync_ptsz since 11010;
        fn cuMemUnmap(ptr: CUdeviceptr, size: usize) = "cuMemUnmap" since 10020, track;
        fn cuMemSetAccess(ptr: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize)
            = "cuMemSetAccess" since 10020, track;
        fn cuMemGetAccess(flags: *mut c_ulonglong, location: *const CUmemLocation, ptr: CUdeviceptr)
            = "cuMemGetAccess" since 10020, track;
        fn cuMemExportToShareableHandle(
            shareableHandle: *mut c_void, handle: CUmemGenericAllocationHandle,
            handleType: CUmemAllocationHandleType, flags: c_ulonglong
        ) = "cuMemExportToShareableHandle" since 10020, track;
        fn cuMemImportFromShareableHandle(
            handle: *mut CUmemGenericAllocationHandle, osHandle: *mut c_void,
            shHandleType: CUmemAllocationHandleType
        ) = "cuMemImportFromShareableHandle" since 10020, track;
        fn cuMemGetAllocationGranularity(
            granularity: *mut usize, prop: *const CUmemAllocationProp,
            option: CUmemAllocationGranularity_flags
        ) = "cuMemGetAllocationGranularity" since 10020, leave;
        fn cuMemGetAllocationPropertiesFromHandle(
            prop: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle
        ) = "cuMemGetAllocationPropertiesFromHandle" since 10020, track;
        fn cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, addr: *mut c_void)
            = "cuMemRetainAllocationHandle" since 11000, track;

        // Primary contexts
        fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice)
            = "cuDevicePrimaryCtxRetain" since 7000, track;
        fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) = "cuDevicePrimaryCtxRelease" since 11000, virtualise;
        fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: c_uint)
            = "cuDevicePrimaryCtxSetFlags" since 11000, gate;
        fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int)
            = "cuDevicePrimaryCtxGetState" since 7000, gate;
        fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) = "cuDevicePrimaryCtxReset" since 11000, virtualise;

        // Contexts
        fn cuCtxCreate_v2(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice)
            = "cuCtxCreate" since 3020, track;
        fn cuCtxCreate_v3(
            pctx: *mut CUcontext, paramsArray: *mut CUexecAffinityParam, numParams: c_int, flags: c_uint,
            dev: CUdevice
        ) = "cuCtxCreate" since 11040, track;
        fn cuCtxCreate_v4(
            pctx: *mut CUcontext, ctxCreateParams: *mut CUctxCreateParams, flags: c_uint, dev: CUdevice
        ) = "cuCtxCreate" since 12050, track;
        fn cuCtxDestroy_v2(ctx: CUcontext) = "cuCtxDestroy" since 4000, virtualise;
        fn cuCtxPushCurrent_v2(ctx: CUcontext) = "cuCtxPushCurrent" since 4000, leave;
        fn cuCtxPopCurrent_v2(pctx: *mut CUcontext) = "cuCtxPopCurrent" since 4000, leave;
        fn cuCtxSetCurrent(ctx: CUcontext) = "cuCtxSetCurrent" since 4000, leave;
        fn cuCtxGetCurrent(pctx: *mut CUcontext) = "cuCtxGetCurrent" since 4000, leave;
        fn cuCtxGetDevice(device: *mut CUdevice) = "cuCtxGetDevice" since 2000, leave;
        fn cuCtxGetDevice_v2(device: *mut CUdevice, ctx: CUcontext) = "cuCtxGetDevice" since 13000, leave;
        fn cuCtxGetFlags(flags: *mut c_uint) = "cuCtxGetFlags" since 7000, leave;
        fn cuCtxSetFlags(flags: c_uint) = "cuCtxSetFlags" since 12010, leave;
        fn cuCtxGetId(ctx: CUcontext, ctxId: *mut c_ulonglong) = "cuCtxGetId" since 12000, leave;
        fn cuCtxSynchronize() = "cuCtxSynchronize" since 2000, leave;
        fn cuCtxSynchronize_v2(ctx: CUcontext) = "cuCtxSynchronize" since 13000, leave;
        fn cuCtxSetLimit(limit: CUlimit, value: usize) = "cuCtxSetLimit" since 3010, leave;
        fn cuCtxGetLimit(pvalue: *mut usize, limit: CUlimit) = "cuCtxGetLimit" since 3010, leave;
        fn cuCtxGetCacheConfig(pconfig: *mut CUfunc_cache) = "cuCtxGetCacheConfig" since 3020, leave;
        fn cuCtxSetCacheConfig(config: CUfunc_cache) = "cuCtxSetCacheConfig" since 3020, leave;
        fn cuCtxGetApiVersion(ctx: CUcontext, version: *mut c_uint) = "cuCtxGetApiVersion" since 3020, leave;
        fn cuCtxGetStreamPriorityRange(leastPriority: *mut c_int, greatestPriority: *mut c_int)
            = "cuCtxGetStreamPriorityRange" since 5050, leave;
        fn cuCtxResetPersistingL2Cache() = "cuCtxResetPersistingL2Cache" since 11000, gate;
        fn cuCtxGetExecAffinity(pExecAffinity: *mut CUexecAffinityParam, type_: CUexecAffinityType)
            = "cuCtxGetExecAffinity" since 11040, leave;
        fn cuCtxRecordEvent(hCtx: CUcontext, hEvent: CUevent) = "cuCtxRecordEvent" since 12050, gate;
        fn cuCtxWaitEvent(hCtx: CUcontext, hEvent: CUevent) = "cuCtxWaitEvent" since 12050, gate;
        fn cuCtxAttach(pctx: *mut CUcontext, flags: c_uint) = "cuCtxAttach" since 2000, track;
        fn cuCtxDetach(ctx: CUcontext) = "cuCtxDetach" since 2000, virtualise;
        fn cuCtxGetSharedMemConfig(pConfig: *mut CUsharedconfig)
            = "cuCtxGetSharedMemConfig" since 4020, leave;
        fn cuCtxSetSharedMemConfig(config: CUsharedconfig) = "cuCtxSetSharedMemConfig" since 4020, leave;

        // Modules, linking
        fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char) = "cuModuleLoad" since 2000, track;
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void)
            = "cuModuleLoadData" since 2000, track;
        fn cuModuleLoadDataEx(
            module: *mut CUmodule, image: *const c_void, numOptions: c_uint, options: *mut CUjit_option,
            optionValues: *mut *mut c_void
        ) = "cuModuleLoadDataEx" since 2010, track;
        fn cuModuleLoadFatBinary(module: *mut CUmodule, fatCubin: *const c_void)
            = "cuModuleLoadFatBinary" since 2000, track;
        fn cuModuleUnload(hmod: CUmodule) = "cuModuleUnload" since 2000, track;
        fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode)
            = "cuModuleGetLoadingMode" since 11070, leave;
        fn cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char)
            = "cuModuleGetFunction" since 2000, leave;
        fn cuModuleGetFunctionCount(count: *mut c_uint, mod_: CUmodule)
            = "cuModuleGetFunctionCount" since 12040, leave;
        fn cuModuleEnumerateFunctions(functions: *mut CUfunction, numFunctions: c_uint, mod_: CUmodule)
            = "cuModuleEnumerateFunctions" since 12040, leave;
        fn cuModuleGetGlobal_v2(
            dptr: *mut CUdeviceptr, bytes: *mut usize, hmod: CUmodule, name: *const c_char
        ) = "cuModuleGetGlobal" since 3020, track;
        fn cuLinkCreate_v2(
            numOptions: c_uint, options: *mut CUjit_option, optionValues: *mut *mut c_void,
            stateOut: *mut CUlinkState
        ) = "cuLinkCreate" since 6050, leave;
        fn cuLinkAddData_v2(
            state: CUlinkState, type_: CUjitInputType, data: *mut c_void, size: usize, name: *const c_char,
            numOptions: c_uint, options: *mut CUjit_option, optionValues: *mut *mut c_void
        ) = "cuLinkAddData" since 6050, leave;
        fn cuLinkAddFile_v2(
            state: CUlinkState, type_: CUjitInputType, path: *const c_char, numOptions: c_uint,
            options: *mut CUjit_option, optionValues: *mut *mut c_void
        ) = "cuLinkAddFile" since 6050, leave;
        fn cuLinkComplete(state: CUlinkState, cubinOut: *mut *mut c_void, sizeOut: *mut usize)
            = "cuLinkComplete" since 5050, leave;
        fn cuLinkDestroy(state: CUlinkState) = "cuLinkDestroy" since 5050, leave;
        fn cuModuleGetTexRef(pTexRef: *mut CUtexref, hmod: CUmodule, name: *const c_char)
            = "cuModuleGetTexRef" since 2000, leave;
        fn cuModuleGetSurfRef(pSurfRef: *mut CUsurfref, hmod: CUmodule, name: *const c_char)
            = "cuModuleGetSurfRef" since 3000, leave;

        // Libraries, kernels
        fn cuLibraryLoadData(
            library: *mut CUlibrary, code: *const c_void, jitOptions: *mut CUjit_option,
            jitOptionsValues: *mut *mut c_void, numJitOptions: c_uint, libraryOptions: *mut CUlibraryOption,
            libraryOptionValues: *mut *mut c_void, numLibraryOptions: c_uint
        ) = "cuLibraryLoadData" since 12000, track;
        fn cuLibraryLoadFromFile(
            library: *mut CUlibrary, fileName: *const c_char, jitOptions: *mut CUjit_option,
            jitOptionsValues: *mut *mut c_void, numJitOptions: c_uint, libraryOptions: *mut CUlibraryOption,
            libraryOptionValues: *mut *mut c_void, numLibraryOptions: c_uint
        ) = "cuLibraryLoadFromFile" since 12000, track;
        fn cuLibraryUnload(library: CUlibrary) = "cuLibraryUnload" since 12000, track;
        fn cuLibraryGetKernel(pKernel: *mut CUkernel, library: CUlibrary, name: *const c_char)
            = "cuLibraryGetKernel" since 12000, leave;
        fn cuLibraryGetKernelCount(count: *mut c_uint, lib: CUlibrary)
            = "cuLibraryGetKernelCount" since 12040, leave;
        fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, numKernels: c_uint, lib: CUlibrary)
            = "cuLibraryEnumerateKernels" since 12040, leave;
        fn cuLibraryGetModule(pMod: *mut CUmodule, library: CUlibrary)
            = "cuLibraryGetModule" since 12000, leave;
        fn cuKernelGetFunction(pFunc: *mut CUfunction, kernel: CUkernel)
            = "cuKernelGetFunction" since 12000, leave;
        fn cuKernelGetLibrary(pLib: *mut CUlibrary, kernel: CUkernel)
            = "cuKernelGetLibrary" since 12050, leave;
        fn cuLibraryGetGlobal(
            dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char
        ) = "cuLibraryGetGlobal" since 12000, track;
        fn cuLibraryGetManaged(
            dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char
        ) = "cuLibraryGetManaged" since 12000, track;
        fn cuLibraryGetUnifiedFunction(fptr: *mut *mut c_void, library: CUlibrary, symbol: *const c_char)
            = "cuLibraryGetUnifiedFunction" since 12000, leave;
        fn cuKernelGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, kernel: CUkernel, dev: CUdevice)
            = "cuKernelGetAttribute" since 12000, leave;
        fn cuKernelSetAttribute(attrib: CUfunction_attribute, val: c_int, kernel: CUkernel, dev: CUdevice)
            = "cuKernelSetAttribute" since 12000, leave;
        fn cuKernelSetCacheConfig(kernel: CUkernel, config: CUfunc_cache, dev: CUdevice)
            = "cuKernelSetCacheConfig" since 12000, leave;
        fn cuKernelGetName(name: *mut *const c_char, hfunc: CUkernel) = "cuKernelGetName" since 12030, leave;
        fn cuKernelGetParamInfo(
            kernel: CUkernel, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize
        ) = "cuKernelGetParamInfo" since 12040, leave;
        fn cuKernelGetParamCount(kernel: CUkernel, paramCount: *mut usize)
            = "cuKernelGetParamCount" since 13020, leave;

        // Memory: allocation, copies, memsets, arrays, IPC
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = "cuMemGetInfo" since 3020, virtualise;
        fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) = "cuMemAlloc" since 3020, virtualise;
        fn cuMemAllocPitch_v2(
            dptr: *mut CUdeviceptr, pPitch: *mut usize, WidthInBytes: usize, Height: usize,
            ElementSizeBytes: c_uint
        ) = "cuMemAllocPitch" since 3020, virtualise;
        fn cuMemFree_v2(dptr: CUdeviceptr) = "cuMemFree" since 3020, virtualise;
        fn cuMemGetAddressRange_v2(pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr)
            = "cuMemGetAddressRange" since 3020, virtualise;
        fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) = "cuMemAllocHost" since 3020, track;
        fn cuMemFreeHost(p: *mut c_void) = "cuMemFreeHost" since 2000, track;
        fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: c_uint)
            = "cuMemHostAlloc" since 2020, track;
        fn cuMemHostGetDevicePointer_v2(pdptr: *mut CUdeviceptr, p: *mut c_void, Flags: c_uint)
            = "cuMemHostGetDevicePointer" since 3020, track;
        fn cuMemHostGetFlags(pFlags: *mut c_uint, p: *mut c_void) = "cuMemHostGetFlags" since 2030, leave;
        fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint)
            = "cuMemAllocManaged" since 6000, track;
        fn cuDeviceRegisterAsyncNotification(
            device: CUdevice, callbackFunc: CUasyncCallback, userData: *mut c_void,
            callback: *mut CUasyncCallbackHandle
        ) = "cuDeviceRegisterAsyncNotification" since 12040, leave;
        fn cuDeviceUnregisterAsyncNotification(device: CUdevice, callback: CUasyncCallbackHandle)
            = "cuDeviceUnregisterAsyncNotification" since 12040, leave;
        fn cuDeviceGetByPCIBusId(dev: *mut CUdevice, pciBusId: *const c_char)
            = "cuDeviceGetByPCIBusId" since 4010, leave;
        fn cuDeviceGetPCIBusId(pciBusId: *mut c_char, len: c_int, dev: CUdevice)
            = "cuDeviceGetPCIBusId" since 4010, leave;
        fn cuIpcGetEventHandle(pHandle: *mut CUipcEventHandle, event: CUevent)
            = "cuIpcGetEventHandle" since 4010, track;
        fn cuIpcOpenEventHandle(phEvent: *mut CUevent, handle: CUipcEventHandle)
            = "cuIpcOpenEventHandle" since 4010, track;
        fn cuIpcGetMemHandle(pHandle: *mut CUipcMemHandle, dptr: CUdeviceptr)
            = "cuIpcGetMemHandle" since 4010, virtualise;
        fn cuIpcOpenMemHandle(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, Flags: c_uint)
            = "cuIpcOpenMemHandle" since 4010, virtualise;
        fn cuIpcOpenMemHandle_v2(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, Flags: c_uint)
            = "cuIpcOpenMemHandle" since 11000, virtualise;
        fn cuIpcCloseMemHandle(dptr: CUdeviceptr) = "cuIpcCloseMemHandle" since 4010, virtualise;
        fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: c_uint)
            = "cuMemHostRegister" since 6050, track;
        fn cuMemHostUnregister(p: *mut c_void) = "cuMemHostUnregister" since 4000, track;
        fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize)
            = "cuMemcpy" since 4000, gate, per_thread cuMemcpy_ptds since 7000;
        fn cuMemcpyPeer(
            dstDevice: CUdeviceptr, dstContext: CUcontext, srcDevice: CUdeviceptr, srcContext: CUcontext,
            ByteCount: usize
        ) = "cuMemcpyPeer" since 4000, gate, per_thread cuMemcpyPeer_ptds since 7000;
        fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize)
            = "cuMemcpyHtoD" since 3020, gate, per_thread cuMemcpyHtoD_v2_ptds since 7000;
        fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize)
            = "cuMemcpyDtoH" since 3020, gate, per_thread cuMemcpyDtoH_v2_ptds since 7000;
        fn cuMemcpyDtoD_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize)
            = "cuMemcpyDtoD" since 3020, gate, per_thread cuMemcpyDtoD_v2_ptds since 7000;
        fn cuMemcpyDtoA_v2(dstArray: CUarray, dstOffset: usize, srcDevice: CUdeviceptr, ByteCount: usize)
            = "cuMemcpyDtoA" since 3020, gate, per_thread cuMemcpyDtoA_v2_ptds since 7000;
        fn cuMemcpyAtoD_v2(dstDevice: CUdeviceptr, srcArray: CUarray, srcOffset: usize, ByteCount: usize)
            = "cuMemcpyAtoD" since 3020, gate, per_thread cuMemcpyAtoD_v2_ptds since 7000;
        fn cuMemcpyHtoA_v2(dstArray: CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize)
            = "cuMemcpyHtoA" since 3020, gate, per_thread cuMemcpyHtoA_v2_ptds since 7000;
        fn cuMemcpyAtoH_v2(dstHost: *mut c_void, srcArray: CUarray, srcOffset: usize, ByteCount: usize)
            = "cuMemcpyAtoH" since 3020, gate, per_thread cuMemcpyAtoH_v2_ptds since 7000;
        fn cuMemcpyAtoA_v2(
            dstArray: CUarray, dstOffset: usize, srcArray: CUarray, srcOffset: usize, ByteCount: usize
        ) = "cuMemcpyAtoA" since 3020, gate, per_thread cuMemcpyAtoA_v2_ptds since 7000;
        fn cuMemcpy2D_v2(pCopy: *const CUDA_MEMCPY2D)
            = "cuMemcpy2D" since 3020, gate, per_thread cuMemcpy2D_v2_ptds since 7000;
        fn cuMemcpy2DUnaligned_v2(pCopy: *const CUDA_MEMCPY2D)
            = "cuMemcpy2DUnaligned" since 3020, gate, per_thread cuMemcpy2DUnaligned_v2_ptds since 7000;
        fn cuMemcpy3D_v2(pCopy: *const CUDA_MEMCPY3D)
            = "cuMemcpy3D" since 3020, gate, per_thread cuMemcpy3D_v2_ptds since 7000;
        fn cuMemcpy3DPeer(pCopy: *const CUDA_MEMCPY3D_PEER)
            = "cuMemcpy3DPeer" since 4000, gate, per_thread cuMemcpy3DPeer_ptds since 7000;
        fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: CUstream)
            = "cuMemcpyAsync" since 4000, gate, per_thread cuMemcpyAsync_ptsz since 7000;
        fn cuMemcpyPeerAsync(
            dstDevice: CUdeviceptr, dstContext: CUcontext, srcDevice: CUdeviceptr, srcContext: CUcontext,
            ByteCount: usize, hStream: CUstream
        ) = "cuMemcpyPeerAsync" since 4000, gate, per_thread cuMemcpyPeerAsync_ptsz since 7000;
        fn cuMemcpyHtoDAsync_v2(
            dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: CUstream
        ) = "cuMemcpyHtoDAsync" since 3020, gate, per_thread cuMemcpyHtoDAsync_v2_ptsz since 7000;
        fn cuMemcpyDtoHAsync_v2(
            dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream
        ) = "cuMemcpyDtoHAsync" since 3020, gate, per_thread cuMemcpyDtoHAsync_v2_ptsz since 7000;
        fn cuMemcpyDtoDAsync_v2(
            dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream
        ) = "cuMemcpyDtoDAsync" since 3020, gate, per_thread cuMemcpyDtoDAsync_v2_ptsz since 7000;
        fn cuMemcpyHtoAAsync_v2(
            dstArray: CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize, hStream: CUstream
        ) = "cuMemcpyHtoAAsync" since 3020, gate, per_thread cuMemcpyHtoAAsync_v2_ptsz since 7000;
        fn cuMemcpyAtoHAsync_v2(
            dstHost: *mut c_void, srcArray: CUarray, srcOffset: usize, ByteCount: usize, hStream: CUstream
        ) = "cuMemcpyAtoHAsync" since 3020, gate, per_thread cuMemcpyAtoHAsync_v2_ptsz since 7000;
        fn cuMemcpy2DAsync_v2(pCopy: *const CUDA_MEMCPY2D, hStream: CUstream)
            = "cuMemcpy2DAsync" since 3020, gate, per_thread cuMemcpy2DAsync_v2_ptsz since 7000;
        fn cuMemcpy3DAsync_v2(pCopy: *const CUDA_MEMCPY3D, hStream: CUstream)
            = "cuMemcpy3DAsync" since 3020, gate, per_thread cuMemcpy3DAsync_v2_ptsz since 7000;
        fn cuMemcpy3DPeerAsync(pCopy: *const CUDA_MEMCPY3D_PEER, hStream: CUstream)
            = "cuMemcpy3DPeerAsync" since 4000, gate, per_thread cuMemcpy3DPeerAsync_ptsz since 7000;
        fn cuMemcpyBatchAsync(
            dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
            attrs: *mut CUmemcpyAttributes, attrsIdxs: *mut usize, numAttrs: usize, failIdx: *mut usize,
            hStream: CUstream
        ) = "cuMemcpyBatchAsync" since 12080, gate, per_thread cuMemcpyBatchAsync_ptsz since 12080;
        fn cuMemcpyBatchAsync_v2(
            dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
            attrs: *mut CUmemcpyAttributes, attrsIdxs: *mut usize, numAttrs: usize, hStream: CUstream
        ) = "cuMemcpyBatchAsync" since 13000, gate, per_thread cuMemcpyBatchAsync_v2_ptsz since 13000;
        fn cuMemcpy3DBatchAsync(
            numOps: usize, opList: *mut CUDA_MEMCPY3D_BATCH_OP, failIdx: *mut usize, flags: c_ulonglong,
            hStream: CUstream
        ) = "cuMemcpy3DBatchAsync" since 12080, gate, per_thread cuMemcpy3DBatchAsync_ptsz since 12080;
        fn cuMemcpy3DBatchAsync_v2(
            numOps: usize, opList: *mut CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, hStream: CUstream
        ) = "cuMemcpy3DBatchAsync" since 13000, gate, per_thread cuMemcpy3DBatchAsync_v2_ptsz since 13000;
        fn cuMemcpyWithAttributesAsync(
            dst: CUdeviceptr, src: CUdeviceptr, size: usize, attr: *mut CUmemcpyAttributes, hStream: CUstream
        ) = "cuMemcpyWithAttributesAsync" since 13020, gate,
            per_thread cuMemcpyWithAttributesAsync_ptsz since 13020;
        fn cuMemcpy3DWithAttributesAsync(
            op: *mut CUDA_MEMCPY3D_BATCH_OP, flags: c_ulonglong, hStream: CUstream
        ) = "cuMemcpy3DWithAttributesAsync" since 13020, gate,
            per_thread cuMemcpy3DWithAttributesAsync_ptsz since 13020;
        fn cuMemsetD8_v2(dstDevice: CUdeviceptr, uc: c_uchar, N: usize)
            = "cuMemsetD8" since 3020, gate, per_thread cuMemsetD8_v2_ptds since 7000;
        fn cuMemsetD16_v2(dstDevice: CUdeviceptr, us: c_ushort, N: usize)
            = "cuMemsetD16" since 3020, gate, per_thread cuMemsetD16_v2_ptds since 7000;
        fn cuMemsetD32_v2(dstDevice: CUdeviceptr, ui: c_uint, N: usize)
            = "cuMemsetD32" since 3020, gate, per_thread cuMemsetD32_v2_ptds since 7000;
        fn cuMemsetD2D8_v2(dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize)
            = "cuMemsetD2D8" since 3020, gate, per_thread cuMemsetD2D8_v2_ptds since 7000;
        fn cuMemsetD2D16_v2(
            dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize
        ) = "cuMemsetD2D16" since 3020, gate, per_thread cuMemsetD2D16_v2_ptds since 7000;
        fn cuMemsetD2D32_v2(dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize)
            = "cuMemsetD2D32" since 3020, gate, per_thread cuMemsetD2D32_v2_ptds since 7000;
        fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream)
            = "cuMemsetD8Async" since 3020, gate, per_thread cuMemsetD8Async_ptsz since 7000;
        fn cuMemsetD16Async(dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: CUstream)
            = "cuMemsetD16Async" since 3020, gate, per_thread cuMemsetD16Async_ptsz since 7000;
        fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream)
            = "cuMemsetD32Async" since 3020, gate, per_thread cuMemsetD32Async_ptsz since 7000;
        fn cuMemsetD2D8Async(
            dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize,
            hStream: CUstream
        ) = "cuMemsetD2D8Async" since 3020, gate, per_thread cuMemsetD2D8Async_ptsz since 7000;
        fn cuMemsetD2D16Async(
            dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize,
            hStream: CUstream
        ) = "cuMemsetD2D16Async" since 3020, gate, per_thread cuMemsetD2D16Async_ptsz since 7000;
        fn cuMemsetD2D32Async(
            dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize,
            hStream: CUstream
        ) = "cuMemsetD2D32Async" since 3020, gate, per_thread cuMemsetD2D32Async_ptsz since 7000;
        fn cuArrayCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY_DESCRIPTOR)
            = "cuArrayCreate" since 3020, track;
        fn cuArrayGetDescriptor_v2(pArrayDescriptor: *mut CUDA_ARRAY_DESCRIPTOR, hArray: CUarray)
            = "cuArrayGetDescriptor" since 3020, leave;
        fn cuArrayGetSparseProperties(sparseProperties: *mut CUDA_ARRAY_SPARSE_PROPERTIES, array: CUarray)
            = "cuArrayGetSparseProperties" since 11010, leave;
        fn cuMipmappedArrayGetSparseProperties(
            sparseProperties: *mut CUDA_ARRAY_SPARSE_PROPERTIES, mipmap: CUmipmappedArray
        ) = "cuMipmappedArrayGetSparseProperties" since 11010, leave;
        fn cuArrayGetMemoryRequirements(
            memoryRequirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray, device: CUdevice
        ) = "cuArrayGetMemoryRequirements" since 11060, leave;
        fn cuMipmappedArrayGetMemoryRequirements(
            memoryRequirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, mipmap: CUmipmappedArray,
            device: CUdevice
        ) = "cuMipmappedArrayGetMemoryRequirements" since 11060, leave;
        fn cuArrayGetPlane(pPlaneArray: *mut CUarray, hArray: CUarray, planeIdx: c_uint)
            = "cuArrayGetPlane" since 11020, track;
        fn cuArrayDestroy(hArray: CUarray) = "cuArrayDestroy" since 2000, track;
        fn cuArray3DCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR)
            = "cuArray3DCreate" since 3020, track;
        fn cuArray3DGetDescriptor_v2(pArrayDescriptor: *mut CUDA_ARRAY3D_DESCRIPTOR, hArray: CUarray)
            = "cuArray3DGetDescriptor" since 3020, leave;
        fn cuMipmappedArrayCreate(
            pHandle: *mut CUmipmappedArray, pMipmappedArrayDesc: *const CUDA_ARRAY3D_DESCRIPTOR,
            numMipmapLevels: c_uint
        ) = "cuMipmappedArrayCreate" since 5000, track;
        fn cuMipmappedArrayGetLevel(
            pLevelArray: *mut CUarray, hMipmappedArray: CUmipmappedArray, level: c_uint
        ) = "cuMipmappedArrayGetLevel" since 5000, track;
        fn cuMipmappedArrayDestroy(hMipmappedArray: CUmipmappedArray)
            = "cuMipmappedArrayDestroy" since 5000, track;
        fn cuMemGetHandleForAddressRange(
            handle: *mut c_void, dptr: CUdeviceptr, size: usize, handleType: CUmemRangeHandleType,
            flags: c_ulonglong
        ) = "cuMemGetHandleForAddressRange" since 11070, track;
        fn cuMemBatchDecompressAsync(
            paramsArray: *mut CUmemDecompressParams, count: usize, flags: c_uint, errorIndex: *mut usize,
            stream: CUstream
        ) = "cuMemBatchDecompressAsync" since 12060, gate,
            per_thread cuMemBatchDecompressAsync_ptsz since 12060;

        // Stream-ordered allocation, pools
        fn cuMemFreeAsync(dptr: CUdeviceptr, hStream: CUstream)
            = "cuMemFreeAsync" since 11020, track, per_thread cuMemFreeAsync_ptsz since 11020;
        fn cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream)
            = "cuMemAllocAsync" since 11020, track, per_thread cuMemAllocAsync_ptsz since 11020;
        fn cuMemPoolTrimTo(pool: CUmemoryPool, minBytesToKeep: usize) = "cuMemPoolTrimTo" since 11020, track;
        fn cuMemPoolSetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void)
            = "cuMemPoolSetAttribute" since 11020, track;
        fn cuMemPoolGetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void)
            = "cuMemPoolGetAttribute" since 11020, track;
        fn cuMemPoolSetAccess(pool: CUmemoryPool, map: *const CUmemAccessDesc, count: usize)
            = "cuMemPoolSetAccess" since 11020, track;
        fn cuMemPoolGetAccess(
            flags: *mut CUmemAccess_flags, memPool: CUmemoryPool, location: *mut CUmemLocation
        ) = "cuMemPoolGetAccess" since 11020, track;
        fn cuMemPoolCreate(pool: *mut CUmemoryPool, poolProps: *const CUmemPoolProps)
            = "cuMemPoolCreate" since 11020, track;
        fn cuMemPoolDestroy(pool: CUmemoryPool) = "cuMemPoolDestroy" since 11020, track;
        fn cuMemGetDefaultMemPool(
            pool_out: *mut CUmemoryPool, location: *mut CUmemLocation, type_: CUmemAllocationType
        ) = "cuMemGetDefaultMemPool" since 13000, track;
        fn cuMemGetMemPool(pool: *mut CUmemoryPool, location: *mut CUmemLocation, type_: CUmemAllocationType)
            = "cuMemGetMemPool" since 13000, track;
        fn cuMemSetMemPool(location: *mut CUmemLocation, type_: CUmemAllocationType, pool: CUmemoryPool)
            = "cuMemSetMemPool" since 13000, track;
        fn cuMemAllocFromPoolAsync(
            dptr: *mut CUdeviceptr, bytesize: usize, pool: CUmemoryPool, hStream: CUstream
        ) = "cuMemAllocFromPoolAsync" since 11020, track, per_thread cuMemAllocFromPoolAsync_ptsz since 11020;
        fn cuMemPoolExportToShareableHandle(
            handle_out: *mut c_void, pool: CUmemoryPool, handleType: CUmemAllocationHandleType,
            flags: c_ulonglong
        ) = "cuMemPoolExportToShareableHandle" since 11020, track;
        fn cuMemPoolImportFromShareableHandle(
            pool_out: *mut CUmemoryPool, handle: *mut c_void, handleType: CUmemAllocationHandleType,
            flags: c_ulonglong
        ) = "cuMemPoolImportFromShareableHandle" since 11020, track;
        fn cuMemPoolExportPointer(shareData_out: *mut CUmemPoolPtrExportData, ptr: CUdeviceptr)
            = "cuMemPoolExportPointer" since 11020, track;
        fn cuMemPoolImportPointer(
            ptr_out: *mut CUdeviceptr, pool: CUmemoryPool, shareData: *mut CUmemPoolPtrExportData
        ) = "cuMemPoolImportPointer" since 11020, track;

        // Multicast objects
        fn cuMulticastCreate(mcHandle: *mut CUmemGenericAllocationHandle, prop: *const CUmulticastObjectProp)
            = "cuMulticastCreate" since 12010, track;
        fn cuMulticastAddDevice(mcHandle: CUmemGenericAllocationHandle, dev: CUdevice)
            = "cuMulticastAddDevice" since 12010, track;
        fn cuMulticastBindMem(
            mcHandle: CUmemGenericAllocationHandle, mcOffset: usize, memHandle: CUmemGenericAllocationHandle,
            memOffset: usize, size: usize, flags: c_ulonglong
        ) = "cuMulticastBindMem" since 12010, track;
        fn cuMulticastBindMem_v2(
            mcHandle: CUmemGenericAllocationHandle, dev: CUdevice, mcOffset: usize,
            memHandle: CUmemGenericAllocationHandle, memOffset: usize, size: usize, flags: c_ulonglong
        ) = "cuMulticastBindMem" since 13010, track;
        fn cuMulticastBindAddr(
            mcHandle: CUmemGenericAllocationHandle, mcOffset: usize, memptr: CUdeviceptr, size: usize,
            flags: c_ulonglong
        ) = "cuMulticastBindAddr" since 12010, track;
        fn cuMulticastBindAddr_v2(
            mcHandle: CUmemGenericAllocationHandle, dev: CUdevice, mcOffset: usize, memptr: CUdeviceptr,
            size: usize, flags: c_ulonglong
        ) = "cuMulticastBindAddr" since 13010, track;
        fn cuMulticastUnbind(
            mcHandle: CUmemGenericAllocationHandle, dev: CUdevice, mcOffset: usize, size: usize
        ) = "cuMulticastUnbind" since 12010, track;
        fn cuMulticastGetGranularity(
            granularity: *mut usize, prop: *const CUmulticastObjectProp, option: CUmulticastGranularity_flags
        ) = "cuMulticastGetGranularity" since 12010, leave;

        // Cliques
        fn cuDeviceGetFabricClusterUuid(uuid: *mut CUuuid, dev: CUdevice)
            = "cuDeviceGetFabricClusterUuid" since 13040, leave;
        fn cuDeviceGetCliqueCount(count: *mut usize, dev: CUdevice)
            = "cuDeviceGetCliqueCount" since 13040, leave;
        fn cuDeviceGetCliqueInfo(cliqueInfo: *mut CUcliqueInfo, count: *mut usize, dev: CUdevice)
            = "cuDeviceGetCliqueInfo" since 13040, leave;

        // Logical endpoints
        fn cuLogicalEndpointIdReserve(baseLeId: *mut CUlogicalEndpointId, count: cuuint32_t)
            = "cuLogicalEndpointIdReserve" since 13030, taint;
        fn cuLogicalEndpointIdRelease(baseLeId: CUlogicalEndpointId, count: cuuint32_t)
            = "cuLogicalEndpointIdRelease" since 13030, taint;
        fn cuLogicalEndpointCreate(leId: CUlogicalEndpointId, prop: *const CUlogicalEndpointProp)
            = "cuLogicalEndpointCreate" since 13030, taint;
        fn cuLogicalEndpointAddDevice(leId: CUlogicalEndpointId, dev: CUdevice)
            = "cuLogicalEndpointAddDevice" since 13030, taint;
        fn cuLogicalEndpointDestroy(leId: CUlogicalEndpointId)
            = "cuLogicalEndpointDestroy" since 13030, taint;
        fn cuLogicalEndpointBindAddr(
            leId: CUlogicalEndpointId, dev: CUdevice, offset: cuuint64_t, ptr: *mut c_void, size: cuuint64_t,
            flags: c_ulonglong
        ) = "cuLogicalEndpointBindAddr" since 13030, taint;
        fn cuLogicalEndpointBindMem(
            leId: CUlogicalEndpointId, dev: CUdevice, offset: cuuint64_t,
            memHandle: CUmemGenericAllocationHandle, memOffset: cuuint64_t, size: cuuint64_t,
            flags: c_ulonglong
        ) = "cuLogicalEndpointBindMem" since 13030, taint;
        fn cuLogicalEndpointUnbind(
            leId: CUlogicalEndpointId, dev: CUdevice, offset: cuuint64_t, size: cuuint64_t
        ) = "cuLogicalEndpointUnbind" since 13030, taint;
        fn cuLogicalEndpointExport(
            handle: *mut c_void, leId: CUlogicalEndpointId, handleType: CUlogicalEndpointIpcHandleType
        ) = "cuLogicalEndpointExport" since 13030, taint;
        fn cuLogicalEndpointImport(
            leId: CUlogicalEndpointId, handle: *const c_void, handleType: CUlogicalEndpointIpcHandleType
        ) = "cuLogicalEndpointImport" since 13030, taint;
        fn cuLogicalEndpointGetLimits(
            bindAlignment: *mut cuuint64_t, maxSize: *mut cuuint64_t, prop: *const CUlogicalEndpointProp
        ) = "cuLogicalEndpointGetLimits" since 13030, leave;
        fn cuLogicalEndpointQuery(leId: CUlogicalEndpointId, count: cuuint32_t, queryStatus: *mut c_int)
            = "cuLogicalEndpointQuery" since 13030, leave;

        // Fabric copies
        fn cuFabricCpyBatchAsync(
            numOps: usize, opList: *mut CUDA_FABRIC_COPY_BATCH_OP, flags: c_ulonglong, hStream: CUstream
        ) = "cuFabricCpyBatchAsync" since 13050, gate, per_thread cuFabricCpyBatchAsync_ptsz since 13050;

        // Unified addressing, managed memory
        fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr)
            = "cuPointerGetAttribute" since 4000, virtualise;
        fn cuMemPrefetchAsync(devPtr: CUdeviceptr, count: usize, dstDevice: CUdevice, hStream: CUstream)
            = "cuMemPrefetchAsync" since 8000, gate, per_thread cuMemPrefetchAsync_ptsz since 8000;
        fn cuMemPrefetchAsync_v2(
            devPtr: CUdeviceptr, count: usize, location: CUmemLocation, flags: c_uint, hStream: CUstream
        ) = "cuMemPrefetchAsync" since 12020, gate, per_thread cuMemPrefetchAsync_v2_ptsz since 12020;
        fn cuMemAdvise(devPtr: CUdeviceptr, count: usize, advice: CUmem_advise, device: CUdevice)
            = "cuMemAdvise" since 8000, track;
        fn cuMemAdvise_v2(devPtr: CUdeviceptr, count: usize, advice: CUmem_advise, location: CUmemLocation)
            = "cuMemAdvise" since 12020, track;
        fn cuMemPrefetchBatchAsync(
            dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation,
            prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: CUstream
        ) = "cuMemPrefetchBatchAsync" since 13000, gate, per_thread cuMemPrefetchBatchAsync_ptsz since 13000;
        fn cuMemDiscardBatchAsync(
            dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: c_ulonglong, hStream: CUstream
        ) = "cuMemDiscardBatchAsync" since 13000, gate, per_thread cuMemDiscardBatchAsync_ptsz since 13000;
        fn cuMemDiscardAndPrefetchBatchAsync(
            dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation,
            prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: CUstream
        ) = "cuMemDiscardAndPrefetchBatchAsync" since 13000, gate,
            per_thread cuMemDiscardAndPrefetchBatchAsync_ptsz since 13000;
        fn cuMemGetLocationInfo(
            ptr: CUdeviceptr, size: usize, summaryGranularity: usize, samplingGranularity: usize,
            location_out: *mut CUmemLocation
        ) = "cuMemGetLocationInfo" since 13040, leave;
        fn cuMemRangeGetAttribute(
            data: *mut c_void, dataSize: usize, attribute: CUmem_range_attribute, devPtr: CUdeviceptr,
            count: usize
        ) = "cuMemRangeGetAttribute" since 8000, gate;
        fn cuMemRangeGetAttributes(
            data: *mut *mut c_void, dataSizes: *mut usize, attributes: *mut CUmem_range_attribute,
            numAttributes: usize, devPtr: CUdeviceptr, count: usize
        ) = "cuMemRangeGetAttributes" since 8000, gate;
        fn cuPointerSetAttribute(value: *const c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr)
            = "cuPointerSetAttribute" since 6000, virtualise;
        fn cuPointerGetAttributes(
            numAttributes: c_uint, attributes: *mut CUpointer_attribute, data: *mut *mut c_void,
            ptr: CUdeviceptr
        ) = "cuPointerGetAttributes" since 7000, virtualise;

        // Streams, capture
        fn cuStreamCreate(phStream: *mut CUstream, Flags: c_uint) = "cuStreamCreate" since 2000, track;
        fn cuStreamCreateWithPriority(phStream: *mut CUstream, flags: c_uint, priority: c_int)
            = "cuStreamCreateWithPriority" since 5050, track;
        fn cuStreamBeginCaptureToCig(
            hStream: CUstream, streamCigCaptureParams: *mut CUstreamCigCaptureParams
        ) = "cuStreamBeginCaptureToCig" since 13010, taint,
            per_thread cuStreamBeginCaptureToCig_ptsz since 13010;
        fn cuStreamEndCaptureToCig(
            hStream: CUstream
        ) = "cuStreamEndCaptureToCig" since 13010, taint, per_thread cuStreamEndCaptureToCig_ptsz since 13010;
        fn cuStreamGetPriority(hStream: CUstream, priority: *mut c_int)
            = "cuStreamGetPriority" since 5050, leave, per_thread cuStreamGetPriority_ptsz since 7000;
        fn cuStreamGetDevice(hStream: CUstream, device: *mut CUdevice)
            = "cuStreamGetDevice" since 12080, leave, per_thread cuStreamGetDevice_ptsz since 12080;
        fn cuStreamGetFlags(hStream: CUstream, flags: *mut c_uint)
            = "cuStreamGetFlags" since 5050, leave, per_thread cuStreamGetFlags_ptsz since 7000;
        fn cuStreamGetId(hStream: CUstream, streamId: *mut c_ulonglong)
            = "cuStreamGetId" since 12000, leave, per_thread cuStreamGetId_ptsz since 12000;
        fn cuStreamGetCtx(hStream: CUstream, pctx: *mut CUcontext)
            = "cuStreamGetCtx" since 9020, leave, per_thread cuStreamGetCtx_ptsz since 9020;
        fn cuStreamGetCtx_v2(hStream: CUstream, pCtx: *mut CUcontext, pGreenCtx: *mut CUgreenCtx)
            = "cuStreamGetCtx" since 12050, leave, per_thread cuStreamGetCtx_v2_ptsz since 12050;
        fn cuStreamWaitEvent(hStream: CUstream, hEvent: CUevent, Flags: c_uint)
            = "cuStreamWaitEvent" since 3020, gate, per_thread cuStreamWaitEvent_ptsz since 7000;
        fn cuStreamAddCallback(
            hStream: CUstream, callback: CUstreamCallback, userData: *mut c_void, flags: c_uint
        ) = "cuStreamAddCallback" since 5000, gate, per_thread cuStreamAddCallback_ptsz since 7000;
        fn cuStreamBeginCapture(hStream: CUstream)
            = "cuStreamBeginCapture" since 10000, track, per_thread cuStreamBeginCapture_ptsz since 10000;
        fn cuStreamBeginCapture_v2(hStream: CUstream, mode: CUstreamCaptureMode)
            = "cuStreamBeginCapture" since 10010, track, per_thread cuStreamBeginCapture_v2_ptsz since 10010;
        fn cuStreamBeginRecaptureToGraph(
            hStream: CUstream, mode: CUstreamCaptureMode, hGraph: CUgraph,
            callbackFunc: CUgraphRecaptureCallback, userData: *mut c_void
        ) = "cuStreamBeginRecaptureToGraph" since 13030, track,
            per_thread cuStreamBeginRecaptureToGraph_ptsz since 13030;
        fn cuStreamBeginCaptureToGraph(
            hStream: CUstream, hGraph: CUgraph, dependencies: *const CUgraphNode,
            dependencyData: *const CUgraphEdgeData, numDependencies: usize, mode: CUstreamCaptureMode
        ) = "cuStreamBeginCaptureToGraph" since 12030, track,
            per_thread cuStreamBeginCaptureToGraph_ptsz since 12030;
        fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode)
            = "cuThreadExchangeStreamCaptureMode" since 10010, leave;
        fn cuStreamEndCapture(hStream: CUstream, phGraph: *mut CUgraph)
            = "cuStreamEndCapture" since 10000, track, per_thread cuStreamEndCapture_ptsz since 10000;
        fn cuStreamIsCapturing(hStream: CUstream, captureStatus: *mut CUstreamCaptureStatus)
            = "cuStreamIsCapturing" since 10000, leave, per_thread cuStreamIsCapturing_ptsz since 10000;
        fn cuStreamGetCaptureInfo(
            hStream: CUstream, captureStatus_out: *mut CUstreamCaptureStatus, id_out: *mut cuuint64_t
        ) = "cuStreamGetCaptureInfo" since 10010, leave, per_thread cuStreamGetCaptureInfo_ptsz since 10010;
        fn cuStreamGetCaptureInfo_v2(
            hStream: CUstream, captureStatus_out: *mut CUstreamCaptureStatus, id_out: *mut cuuint64_t,
            graph_out: *mut CUgraph, dependencies_out: *mut *const CUgraphNode,
            numDependencies_out: *mut usize
        ) = "cuStreamGetCaptureInfo" since 11030, leave,
            per_thread cuStreamGetCaptureInfo_v2_ptsz since 11030;
        fn cuStreamGetCaptureInfo_v3(
            hStream: CUstream, captureStatus_out: *mut CUstreamCaptureStatus, id_out: *mut cuuint64_t,
            graph_out: *mut CUgraph, dependencies_out: *mut *const CUgraphNode,
            edgeData_out: *mut *const CUgraphEdgeData, numDependencies_out: *mut usize
        ) = "cuStreamGetCaptureInfo" since 12030, leave,
            per_thread cuStreamGetCaptureInfo_v3_ptsz since 12030;
        fn cuStreamUpdateCaptureDependencies(
            hStream: CUstream, dependencies: *mut CUgraphNode, numDependencies: usize, flags: c_uint
        ) = "cuStreamUpdateCaptureDependencies" since 11030, leave,
            per_thread cuStreamUpdateCaptureDependencies_ptsz since 11030;
        fn cuStreamUpdateCaptureDependencies_v2(
            hStream: CUstream, dependencies: *mut CUgraphNode, dependencyData: *const CUgraphEdgeData,
            numDependencies: usize, flags: c_uint
        ) = "cuStreamUpdateCaptureDependencies" since 12030, leave,
            per_thread cuStreamUpdateCaptureDependencies_v2_ptsz since 12030;
        fn cuStreamAttachMemAsync(hStream: CUstream, dptr: CUdeviceptr, length: usize, flags: c_uint)
            = "cuStreamAttachMemAsync" since 6000, gate, per_thread cuStreamAttachMemAsync_ptsz since 7000;
        fn cuStreamQuery(hStream: CUstream)
            = "cuStreamQuery" since 2000, leave, per_thread cuStreamQuery_ptsz since 7000;
        fn cuStreamSynchronize(hStream: CUstream)
            = "cuStreamSynchronize" since 2000, leave, per_thread cuStreamSynchronize_ptsz since 7000;
        fn cuStreamDestroy_v2(hStream: CUstream) = "cuStreamDestroy" since 4000, track;
        fn cuStreamCopyAttributes(dst: CUstream, src: CUstream)
            = "cuStreamCopyAttributes" since 11000, leave, per_thread cuStreamCopyAttributes_ptsz since 11000;
        fn cuStreamGetAttribute(hStream: CUstream, attr: CUstreamAttrID, value_out: *mut CUstreamAttrValue)
            = "cuStreamGetAttribute" since 11000, leave, per_thread cuStreamGetAttribute_ptsz since 11000;
        fn cuStreamSetAttribute(hStream: CUstream, attr: CUstreamAttrID, value: *const CUstreamAttrValue)
            = "cuStreamSetAttribute" since 11000, leave, per_thread cuStreamSetAttribute_ptsz since 11000;

        // Events
        fn cuEventCreate(phEvent: *mut CUevent, Flags: c_uint) = "cuEventCreate" since 2000, track;
        fn cuEventRecord(hEvent: CUevent, hStream: CUstream)
            = "cuEventRecord" since 2000, gate, per_thread cuEventRecord_ptsz since 7000;
        fn cuEventRecordWithFlags(hEvent: CUevent, hStream: CUstream, flags: c_uint)
            = "cuEventRecordWithFlags" since 11010, gate, per_thread cuEventRecordWithFlags_ptsz since 11010;
        fn cuEventQuery(hEvent: CUevent) = "cuEventQuery" since 2000, leave;
        fn cuEventSynchronize(hEvent: CUevent) = "cuEventSynchronize" since 2000, leave;
        fn cuEventDestroy_v2(hEvent: CUevent) = "cuEventDestroy" since 4000, track;
        fn cuEventElapsedTime(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent)
            = "cuEventElapsedTime" since 2000, leave;
        fn cuEventElapsedTime_v2(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent)
            = "cuEventElapsedTime" since 12080, leave;

        // External memory and semaphores
        fn cuImportExternalMemory(
            extMem_out: *mut CUexternalMemory, memHandleDesc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC
        ) = "cuImportExternalMemory" since 10000, track;
        fn cuExternalMemoryGetMappedBuffer(
            devPtr: *mut CUdeviceptr, extMem: CUexternalMemory,
            bufferDesc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC
        ) = "cuExternalMemoryGetMappedBuffer" since 10000, track;
        fn cuExternalMemoryGetMappedMipmappedArray(
            mipmap: *mut CUmipmappedArray, extMem: CUexternalMemory,
            mipmapDesc: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC
        ) = "cuExternalMemoryGetMappedMipmappedArray" since 10000, track;
        fn cuDestroyExternalMemory(extMem: CUexternalMemory) = "cuDestroyExternalMemory" since 10000, track;
        fn cuImportExternalSemaphore(
            extSem_out: *mut CUexternalSemaphore, semHandleDesc: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC
        ) = "cuImportExternalSemaphore" since 10000, track;
        fn cuSignalExternalSemaphoresAsync(
            extSemArray: *const CUexternalSemaphore,
            paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, numExtSems: c_uint, stream: CUstream
        ) = "cuSignalExternalSemaphoresAsync" since 10000, gate,
            per_thread cuSignalExternalSemaphoresAsync_ptsz since 10000;
        fn cuWaitExternalSemaphoresAsync(
            extSemArray: *const CUexternalSemaphore, paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
            numExtSems: c_uint, stream: CUstream
        ) = "cuWaitExternalSemaphoresAsync" since 10000, gate,
            per_thread cuWaitExternalSemaphoresAsync_ptsz since 10000;
        fn cuDestroyExternalSemaphore(extSem: CUexternalSemaphore)
            = "cuDestroyExternalSemaphore" since 10000, track;

        // Stream memory operations
        fn cuStreamWaitValue32(stream: CUstream, addr: CUdeviceptr, value: cuuint32_t, flags: c_uint)
            = "cuStreamWaitValue32" since 8000, gate, per_thread cuStreamWaitValue32_ptsz since 8000;
        fn cuStreamWaitValue32_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint32_t, flags: c_uint)
            = "cuStreamWaitValue32" since 11070, gate, per_thread cuStreamWaitValue32_v2_ptsz since 11070;
        fn cuStreamWaitValue64(stream: CUstream, addr: CUdeviceptr, value: cuuint64_t, flags: c_uint)
            = "cuStreamWaitValue64" since 9000, gate, per_thread cuStreamWaitValue64_ptsz since 9000;
        fn cuStreamWaitValue64_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint64_t, flags: c_uint)
            = "cuStreamWaitValue64" since 11070, gate, per_thread cuStreamWaitValue64_v2_ptsz since 11070;
        fn cuStreamWriteValue32(stream: CUstream, addr: CUdeviceptr, value: cuuint32_t, flags: c_uint)
            = "cuStreamWriteValue32" since 8000, gate, per_thread cuStreamWriteValue32_ptsz since 8000;
        fn cuStreamWriteValue32_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint32_t, flags: c_uint)
            = "cuStreamWriteValue32" since 11070, gate, per_thread cuStreamWriteValue32_v2_ptsz since 11070;
        fn cuStreamWriteValue64(stream: CUstream, addr: CUdeviceptr, value: cuuint64_t, flags: c_uint)
            = "cuStreamWriteValue64" since 9000, gate, per_thread cuStreamWriteValue64_ptsz since 9000;
        fn cuStreamWriteValue64_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint64_t, flags: c_uint)
            = "cuStreamWriteValue64" since 11070, gate, per_thread cuStreamWriteValue64_v2_ptsz since 11070;
        fn cuStreamBatchMemOp(
            stream: CUstream, count: c_uint, paramArray: *mut CUstreamBatchMemOpParams, flags: c_uint
        ) = "cuStreamBatchMemOp" since 8000, gate, per_thread cuStreamBatchMemOp_ptsz since 8000;
        fn cuStreamBatchMemOp_v2(
            stream: CUstream, count: c_uint, paramArray: *mut CUstreamBatchMemOpParams, flags: c_uint
        ) = "cuStreamBatchMemOp" since 11070, gate, per_thread cuStreamBatchMemOp_v2_ptsz since 11070;

        // Functions, launches
        fn cuFuncGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, hfunc: CUfunction)
            = "cuFuncGetAttribute" since 2020, leave;
        fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: c_int)
            = "cuFuncSetAttribute" since 9000, leave;
        fn cuFuncSetCacheConfig(hfunc: CUfunction, config: CUfunc_cache)
            = "cuFuncSetCacheConfig" since 3000, leave;
        fn cuFuncGetModule(hmod: *mut CUmodule, hfunc: CUfunction) = "cuFuncGetModule" since 11000, leave;
        fn cuFuncGetName(name: *mut *const c_char, hfunc: CUfunction) = "cuFuncGetName" since 12030, leave;
        fn cuFuncGetParamInfo(
            func: CUfunction, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize
        ) = "cuFuncGetParamInfo" since 12040, leave;
        fn cuFuncGetParamCount(func: CUfunction, paramCount: *mut usize)
            = "cuFuncGetParamCount" since 13020, leave;
        fn cuFuncIsLoaded(state: *mut CUfunctionLoadingState, function: CUfunction)
            = "cuFuncIsLoaded" since 12040, leave;
        fn cuFuncLoad(function: CUfunction) = "cuFuncLoad" since 12040, leave;
        fn cuLaunchKernel(
            f: CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint,
            blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: CUstream,
            kernelParams: *mut *mut c_void, extra: *mut *mut c_void
        ) = "cuLaunchKernel" since 4000, gate, per_thread cuLaunchKernel_ptsz since 7000;
        fn cuLaunchKernelEx(
            config: *const CUlaunchConfig, f: CUfunction, kernelParams: *mut *mut c_void,
            extra: *mut *mut c_void
        ) = "cuLaunchKernelEx" since 11060, gate, per_thread cuLaunchKernelEx_ptsz since 11060;
        fn cuLaunchCooperativeKernel(
            f: CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint,
            blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: CUstream,
            kernelParams: *mut *mut c_void
        ) = "cuLaunchCooperativeKernel" since 9000, gate,
            per_thread cuLaunchCooperativeKernel_ptsz since 9000;
        fn cuLaunchHostFunc(hStream: CUstream, fn_: CUhostFn, userData: *mut c_void)
            = "cuLaunchHostFunc" since 10000, gate, per_thread cuLaunchHostFunc_ptsz since 10000;
        fn cuLaunchHostFunc_v2(hStream: CUstream, fn_: CUhostFn, userData: *mut c_void, syncMode: c_uint)
            = "cuLaunchHostFunc" since 13010, gate, per_thread cuLaunchHostFunc_v2_ptsz since 13010;

        // Functions, launches: deprecated
        fn cuFuncSetBlockShape(hfunc: CUfunction, x: c_int, y: c_int, z: c_int)
            = "cuFuncSetBlockShape" since 2000, leave;
        fn cuFuncSetSharedSize(hfunc: CUfunction, bytes: c_uint) = "cuFuncSetSharedSize" since 2000, leave;
        fn cuParamSetSize(hfunc: CUfunction, numbytes: c_uint) = "cuParamSetSize" since 2000, leave;
        fn cuParamSeti(hfunc: CUfunction, offset: c_int, value: c_uint) = "cuParamSeti" since 2000, leave;
        fn cuParamSetf(hfunc: CUfunction, offset: c_int, value: f32) = "cuParamSetf" since 2000, leave;
        fn cuParamSetv(hfunc: CUfunction, offset: c_int, ptr: *mut c_void, numbytes: c_uint)
            = "cuParamSetv" since 2000, leave;
        fn cuLaunch(f: CUfunction) = "cuLaunch" since 2000, gate;
        fn cuLaunchGrid(f: CUfunction, grid_width: c_int, grid_height: c_int)
            = "cuLaunchGrid" since 2000, gate;
        fn cuLaunchGridAsync(f: CUfunction, grid_width: c_int, grid_height: c_int, hStream: CUstream)
            = "cuLaunchGridAsync" since 2000, gate;
        fn cuLaunchCooperativeKernelMultiDevice(
            launchParamsList: *mut CUDA_LAUNCH_PARAMS, numDevices: c_uint, flags: c_uint
        ) = "cuLaunchCooperativeKernelMultiDevice" since 9000, gate;
        fn cuParamSetTexRef(hfunc: CUfunction, texunit: c_int, hTexRef: CUtexref)
            = "cuParamSetTexRef" since 2000, leave;
        fn cuFuncSetSharedMemConfig(hfunc: CUfunction, config: CUsharedconfig)
            = "cuFuncSetSharedMemConfig" since 4020, leave;

        // Graphs
        fn cuGraphCreate(phGraph: *mut CUgraph, flags: c_uint) = "cuGraphCreate" since 10000, track;
        fn cuGraphAddKernelNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_KERNEL_NODE_PARAMS_v1
        ) = "cuGraphAddKernelNode" since 10000, gate;
        fn cuGraphAddKernelNode_v2(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_KERNEL_NODE_PARAMS
        ) = "cuGraphAddKernelNode" since 12000, gate;
        fn cuGraphKernelNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUDA_KERNEL_NODE_PARAMS_v1)
            = "cuGraphKernelNodeGetParams" since 10000, leave;
        fn cuGraphKernelNodeGetParams_v2(hNode: CUgraphNode, nodeParams: *mut CUDA_KERNEL_NODE_PARAMS)
            = "cuGraphKernelNodeGetParams" since 12000, leave;
        fn cuGraphKernelNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_KERNEL_NODE_PARAMS_v1)
            = "cuGraphKernelNodeSetParams" since 10000, gate;
        fn cuGraphKernelNodeSetParams_v2(hNode: CUgraphNode, nodeParams: *const CUDA_KERNEL_NODE_PARAMS)
            = "cuGraphKernelNodeSetParams" since 12000, gate;
        fn cuGraphAddMemcpyNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, copyParams: *const CUDA_MEMCPY3D, ctx: CUcontext
        ) = "cuGraphAddMemcpyNode" since 10000, gate;
        fn cuGraphMemcpyNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUDA_MEMCPY3D)
            = "cuGraphMemcpyNodeGetParams" since 10000, leave;
        fn cuGraphMemcpyNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_MEMCPY3D)
            = "cuGraphMemcpyNodeSetParams" since 10000, gate;
        fn cuGraphAddMemsetNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, memsetParams: *const CUDA_MEMSET_NODE_PARAMS, ctx: CUcontext
        ) = "cuGraphAddMemsetNode" since 10000, gate;
        fn cuGraphMemsetNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUDA_MEMSET_NODE_PARAMS)
            = "cuGraphMemsetNodeGetParams" since 10000, leave;
        fn cuGraphMemsetNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_MEMSET_NODE_PARAMS)
            = "cuGraphMemsetNodeSetParams" since 10000, gate;
        fn cuGraphAddHostNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_HOST_NODE_PARAMS
        ) = "cuGraphAddHostNode" since 10000, gate;
        fn cuGraphHostNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUDA_HOST_NODE_PARAMS)
            = "cuGraphHostNodeGetParams" since 10000, leave;
        fn cuGraphHostNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_HOST_NODE_PARAMS)
            = "cuGraphHostNodeSetParams" since 10000, gate;
        fn cuGraphAddChildGraphNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, childGraph: CUgraph
        ) = "cuGraphAddChildGraphNode" since 10000, gate;
        fn cuGraphChildGraphNodeGetGraph(hNode: CUgraphNode, phGraph: *mut CUgraph)
            = "cuGraphChildGraphNodeGetGraph" since 10000, leave;
        fn cuGraphAddEmptyNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize
        ) = "cuGraphAddEmptyNode" since 10000, gate;
        fn cuGraphAddEventRecordNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, event: CUevent
        ) = "cuGraphAddEventRecordNode" since 11010, gate;
        fn cuGraphEventRecordNodeGetEvent(hNode: CUgraphNode, event_out: *mut CUevent)
            = "cuGraphEventRecordNodeGetEvent" since 11010, leave;
        fn cuGraphEventRecordNodeSetEvent(hNode: CUgraphNode, event: CUevent)
            = "cuGraphEventRecordNodeSetEvent" since 11010, leave;
        fn cuGraphAddEventWaitNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, event: CUevent
        ) = "cuGraphAddEventWaitNode" since 11010, gate;
        fn cuGraphEventWaitNodeGetEvent(hNode: CUgraphNode, event_out: *mut CUevent)
            = "cuGraphEventWaitNodeGetEvent" since 11010, leave;
        fn cuGraphEventWaitNodeSetEvent(hNode: CUgraphNode, event: CUevent)
            = "cuGraphEventWaitNodeSetEvent" since 11010, leave;
        fn cuGraphAddExternalSemaphoresSignalNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS
        ) = "cuGraphAddExternalSemaphoresSignalNode" since 11020, gate;
        fn cuGraphExternalSemaphoresSignalNodeGetParams(
            hNode: CUgraphNode, params_out: *mut CUDA_EXT_SEM_SIGNAL_NODE_PARAMS
        ) = "cuGraphExternalSemaphoresSignalNodeGetParams" since 11020, leave;
        fn cuGraphExternalSemaphoresSignalNodeSetParams(
            hNode: CUgraphNode, nodeParams: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS
        ) = "cuGraphExternalSemaphoresSignalNodeSetParams" since 11020, gate;
        fn cuGraphAddExternalSemaphoresWaitNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS
        ) = "cuGraphAddExternalSemaphoresWaitNode" since 11020, gate;
        fn cuGraphExternalSemaphoresWaitNodeGetParams(
            hNode: CUgraphNode, params_out: *mut CUDA_EXT_SEM_WAIT_NODE_PARAMS
        ) = "cuGraphExternalSemaphoresWaitNodeGetParams" since 11020, leave;
        fn cuGraphExternalSemaphoresWaitNodeSetParams(
            hNode: CUgraphNode, nodeParams: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS
        ) = "cuGraphExternalSemaphoresWaitNodeSetParams" since 11020, gate;
        fn cuGraphAddBatchMemOpNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        ) = "cuGraphAddBatchMemOpNode" since 11070, gate;
        fn cuGraphBatchMemOpNodeGetParams(
            hNode: CUgraphNode, nodeParams_out: *mut CUDA_BATCH_MEM_OP_NODE_PARAMS
        ) = "cuGraphBatchMemOpNodeGetParams" since 11070, leave;
        fn cuGraphBatchMemOpNodeSetParams(
            hNode: CUgraphNode, nodeParams: *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        ) = "cuGraphBatchMemOpNodeSetParams" since 11070, gate;
        fn cuGraphExecBatchMemOpNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        ) = "cuGraphExecBatchMemOpNodeSetParams" since 11070, gate;
        fn cuGraphAddMemAllocNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *mut CUDA_MEM_ALLOC_NODE_PARAMS
        ) = "cuGraphAddMemAllocNode" since 11040, track;
        fn cuGraphMemAllocNodeGetParams(hNode: CUgraphNode, params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS)
            = "cuGraphMemAllocNodeGetParams" since 11040, leave;
        fn cuGraphAddMemFreeNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, dptr: CUdeviceptr
        ) = "cuGraphAddMemFreeNode" since 11040, track;
        fn cuGraphMemFreeNodeGetParams(hNode: CUgraphNode, dptr_out: *mut CUdeviceptr)
            = "cuGraphMemFreeNodeGetParams" since 11040, leave;
        fn cuDeviceGraphMemTrim(device: CUdevice) = "cuDeviceGraphMemTrim" since 11040, track;
        fn cuDeviceGetGraphMemAttribute(device: CUdevice, attr: CUgraphMem_attribute, value: *mut c_void)
            = "cuDeviceGetGraphMemAttribute" since 11040, leave;
        fn cuDeviceSetGraphMemAttribute(device: CUdevice, attr: CUgraphMem_attribute, value: *mut c_void)
            = "cuDeviceSetGraphMemAttribute" since 11040, leave;
        fn cuGraphClone(phGraphClone: *mut CUgraph, originalGraph: CUgraph)
            = "cuGraphClone" since 10000, track;
        fn cuGraphNodeFindInClone(phNode: *mut CUgraphNode, hOriginalNode: CUgraphNode, hClonedGraph: CUgraph)
            = "cuGraphNodeFindInClone" since 10000, leave;
        fn cuGraphNodeGetType(hNode: CUgraphNode, type_: *mut CUgraphNodeType)
            = "cuGraphNodeGetType" since 10000, leave;
        fn cuGraphNodeGetContainingGraph(hNode: CUgraphNode, phGraph: *mut CUgraph)
            = "cuGraphNodeGetContainingGraph" since 13010, leave;
        fn cuGraphNodeGetLocalId(hNode: CUgraphNode, nodeId: *mut c_uint)
            = "cuGraphNodeGetLocalId" since 13010, leave;
        fn cuGraphNodeGetToolsId(hNode: CUgraphNode, toolsNodeId: *mut c_ulonglong)
            = "cuGraphNodeGetToolsId" since 13010, leave;
        fn cuGraphGetId(hGraph: CUgraph, graphId: *mut c_uint) = "cuGraphGetId" since 13010, leave;
        fn cuGraphExecGetId(hGraphExec: CUgraphExec, graphId: *mut c_uint)
            = "cuGraphExecGetId" since 13010, leave;
        fn cuGraphGetNodes(hGraph: CUgraph, nodes: *mut CUgraphNode, numNodes: *mut usize)
            = "cuGraphGetNodes" since 10000, leave;
        fn cuGraphGetRootNodes(hGraph: CUgraph, rootNodes: *mut CUgraphNode, numRootNodes: *mut usize)
            = "cuGraphGetRootNodes" since 10000, leave;
        fn cuGraphGetEdges(
            hGraph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, numEdges: *mut usize
        ) = "cuGraphGetEdges" since 10000, leave;
        fn cuGraphGetEdges_v2(
            hGraph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, edgeData: *mut CUgraphEdgeData,
            numEdges: *mut usize
        ) = "cuGraphGetEdges" since 12030, leave;
        fn cuGraphNodeGetDependencies(
            hNode: CUgraphNode, dependencies: *mut CUgraphNode, numDependencies: *mut usize
        ) = "cuGraphNodeGetDependencies" since 10000, leave;
        fn cuGraphNodeGetDependencies_v2(
            hNode: CUgraphNode, dependencies: *mut CUgraphNode, edgeData: *mut CUgraphEdgeData,
            numDependencies: *mut usize
        ) = "cuGraphNodeGetDependencies" since 12030, leave;
        fn cuGraphNodeGetDependentNodes(
            hNode: CUgraphNode, dependentNodes: *mut CUgraphNode, numDependentNodes: *mut usize
        ) = "cuGraphNodeGetDependentNodes" since 10000, leave;
        fn cuGraphNodeGetDependentNodes_v2(
            hNode: CUgraphNode, dependentNodes: *mut CUgraphNode, edgeData: *mut CUgraphEdgeData,
            numDependentNodes: *mut usize
        ) = "cuGraphNodeGetDependentNodes" since 12030, leave;
        fn cuGraphAddDependencies(
            hGraph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, numDependencies: usize
        ) = "cuGraphAddDependencies" since 10000, leave;
        fn cuGraphAddDependencies_v2(
            hGraph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
            edgeData: *const CUgraphEdgeData, numDependencies: usize
        ) = "cuGraphAddDependencies" since 12030, leave;
        fn cuGraphRemoveDependencies(
            hGraph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, numDependencies: usize
        ) = "cuGraphRemoveDependencies" since 10000, leave;
        fn cuGraphRemoveDependencies_v2(
            hGraph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
            edgeData: *const CUgraphEdgeData, numDependencies: usize
        ) = "cuGraphRemoveDependencies" since 12030, leave;
        fn cuGraphDestroyNode(hNode: CUgraphNode) = "cuGraphDestroyNode" since 10000, leave;
        fn cuGraphInstantiate_v2(
            phGraphExec: *mut CUgraphExec, hGraph: CUgraph, phErrorNode: *mut CUgraphNode,
            logBuffer: *mut c_char, bufferSize: usize
        ) = "cuGraphInstantiate" since 11000, track;
        fn cuGraphInstantiateWithFlags(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, flags: c_ulonglong)
            = "cuGraphInstantiateWithFlags" since 11040, track;
        fn cuGraphInstantiateWithParams(
            phGraphExec: *mut CUgraphExec, hGraph: CUgraph,
            instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS
        ) = "cuGraphInstantiateWithParams" since 12000, track,
            per_thread cuGraphInstantiateWithParams_ptsz since 12000;
        fn cuGraphExecGetFlags(hGraphExec: CUgraphExec, flags: *mut cuuint64_t)
            = "cuGraphExecGetFlags" since 12000, leave;
        fn cuGraphExecKernelNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *const CUDA_KERNEL_NODE_PARAMS_v1
        ) = "cuGraphExecKernelNodeSetParams" since 10010, gate;
        fn cuGraphExecKernelNodeSetParams_v2(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *const CUDA_KERNEL_NODE_PARAMS
        ) = "cuGraphExecKernelNodeSetParams" since 12000, gate;
        fn cuGraphExecMemcpyNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, copyParams: *const CUDA_MEMCPY3D, ctx: CUcontext
        ) = "cuGraphExecMemcpyNodeSetParams" since 10020, gate;
        fn cuGraphExecMemsetNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, memsetParams: *const CUDA_MEMSET_NODE_PARAMS,
            ctx: CUcontext
        ) = "cuGraphExecMemsetNodeSetParams" since 10020, gate;
        fn cuGraphExecHostNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *const CUDA_HOST_NODE_PARAMS
        ) = "cuGraphExecHostNodeSetParams" since 10020, gate;
        fn cuGraphExecChildGraphNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, childGraph: CUgraph
        ) = "cuGraphExecChildGraphNodeSetParams" since 11010, gate;
        fn cuGraphExecEventRecordNodeSetEvent(hGraphExec: CUgraphExec, hNode: CUgraphNode, event: CUevent)
            = "cuGraphExecEventRecordNodeSetEvent" since 11010, leave;
        fn cuGraphExecEventWaitNodeSetEvent(hGraphExec: CUgraphExec, hNode: CUgraphNode, event: CUevent)
            = "cuGraphExecEventWaitNodeSetEvent" since 11010, leave;
        fn cuGraphExecExternalSemaphoresSignalNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS
        ) = "cuGraphExecExternalSemaphoresSignalNodeSetParams" since 11020, gate;
        fn cuGraphExecExternalSemaphoresWaitNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS
        ) = "cuGraphExecExternalSemaphoresWaitNodeSetParams" since 11020, gate;
        fn cuGraphNodeSetEnabled(hGraphExec: CUgraphExec, hNode: CUgraphNode, isEnabled: c_uint)
            = "cuGraphNodeSetEnabled" since 11060, leave;
        fn cuGraphNodeGetEnabled(hGraphExec: CUgraphExec, hNode: CUgraphNode, isEnabled: *mut c_uint)
            = "cuGraphNodeGetEnabled" since 11060, leave;
        fn cuGraphUpload(hGraphExec: CUgraphExec, hStream: CUstream)
            = "cuGraphUpload" since 11010, gate, per_thread cuGraphUpload_ptsz since 11010;
        fn cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream)
            = "cuGraphLaunch" since 10000, gate, per_thread cuGraphLaunch_ptsz since 10000;
        fn cuGraphExecDestroy(hGraphExec: CUgraphExec) = "cuGraphExecDestroy" since 10000, track;
        fn cuGraphDestroy(hGraph: CUgraph) = "cuGraphDestroy" since 10000, track;
        fn cuGraphExecUpdate(
            hGraphExec: CUgraphExec, hGraph: CUgraph, hErrorNode_out: *mut CUgraphNode,
            updateResult_out: *mut CUgraphExecUpdateResult
        ) = "cuGraphExecUpdate" since 10020, gate;
        fn cuGraphExecUpdate_v2(
            hGraphExec: CUgraphExec, hGraph: CUgraph, resultInfo: *mut CUgraphExecUpdateResultInfo
        ) = "cuGraphExecUpdate" since 12000, gate;
        fn cuGraphKernelNodeCopyAttributes(dst: CUgraphNode, src: CUgraphNode)
            = "cuGraphKernelNodeCopyAttributes" since 11000, leave;
        fn cuGraphKernelNodeGetAttribute(
            hNode: CUgraphNode, attr: CUkernelNodeAttrID, value_out: *mut CUkernelNodeAttrValue
        ) = "cuGraphKernelNodeGetAttribute" since 11000, leave;
        fn cuGraphKernelNodeSetAttribute(
            hNode: CUgraphNode, attr: CUkernelNodeAttrID, value: *const CUkernelNodeAttrValue
        ) = "cuGraphKernelNodeSetAttribute" since 11000, leave;
        fn cuGraphDebugDotPrint(hGraph: CUgraph, path: *const c_char, flags: c_uint)
            = "cuGraphDebugDotPrint" since 11030, leave;
        fn cuUserObjectCreate(
            object_out: *mut CUuserObject, ptr: *mut c_void, destroy: CUhostFn, initialRefcount: c_uint,
            flags: c_uint
        ) = "cuUserObjectCreate" since 11030, leave;
        fn cuUserObjectRetain(object: CUuserObject, count: c_uint) = "cuUserObjectRetain" since 11030, leave;
        fn cuUserObjectRelease(object: CUuserObject, count: c_uint)
            = "cuUserObjectRelease" since 11030, leave;
        fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint)
            = "cuGraphRetainUserObject" since 11030, leave;
        fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint)
            = "cuGraphReleaseUserObject" since 11030, leave;
        fn cuGraphAddNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *mut CUgraphNodeParams
        ) = "cuGraphAddNode" since 12020, track;
        fn cuGraphAddNode_v2(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            dependencyData: *const CUgraphEdgeData, numDependencies: usize,
            nodeParams: *mut CUgraphNodeParams
        ) = "cuGraphAddNode" since 12030, track;
        fn cuGraphAddNode_v3(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            dependencyData: *const CUgraphEdgeData, numDependencies: usize,
            nodeParams: *mut CUgraphNodeParams
        ) = "cuGraphAddNode" since 13040, track;
        fn cuGraphNodeSetParams(hNode: CUgraphNode, nodeParams: *mut CUgraphNodeParams)
            = "cuGraphNodeSetParams" since 12020, gate;
        fn cuGraphNodeSetParams_v2(hNode: CUgraphNode, nodeParams: *mut CUgraphNodeParams)
            = "cuGraphNodeSetParams" since 13040, gate;
        fn cuGraphNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUgraphNodeParams)
            = "cuGraphNodeGetParams" since 13020, leave;
        fn cuGraphExecNodeSetParams(
            hGraphExec: CUgraphExec, hNode: CUgraphNode, nodeParams: *mut CUgraphNodeParams
        ) = "cuGraphExecNodeSetParams" since 12020, gate;
        fn cuGraphConditionalHandleCreate(
            pHandle_out: *mut CUgraphConditionalHandle, hGraph: CUgraph, ctx: CUcontext,
            defaultLaunchValue: c_uint, flags: c_uint
        ) = "cuGraphConditionalHandleCreate" since 12030, leave;

        // Occupancy
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            numBlocks: *mut c_int, func: CUfunction, blockSize: c_int, dynamicSMemSize: usize
        ) = "cuOccupancyMaxActiveBlocksPerMultiprocessor" since 6050, leave;
        fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
            numBlocks: *mut c_int, func: CUfunction, blockSize: c_int, dynamicSMemSize: usize, flags: c_uint
        ) = "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" since 7000, leave;
        fn cuOccupancyMaxPotentialBlockSize(
            minGridSize: *mut c_int, blockSize: *mut c_int, func: CUfunction,
            blockSizeToDynamicSMemSize: CUoccupancyB2DSize, dynamicSMemSize: usize, blockSizeLimit: c_int
        ) = "cuOccupancyMaxPotentialBlockSize" since 6050, leave;
        fn cuOccupancyMaxPotentialBlockSizeWithFlags(
            minGridSize: *mut c_int, blockSize: *mut c_int, func: CUfunction,
            blockSizeToDynamicSMemSize: CUoccupancyB2DSize, dynamicSMemSize: usize, blockSizeLimit: c_int,
            flags: c_uint
        ) = "cuOccupancyMaxPotentialBlockSizeWithFlags" since 7000, leave;
        fn cuOccupancyAvailableDynamicSMemPerBlock(
            dynamicSmemSize: *mut usize, func: CUfunction, numBlocks: c_int, blockSize: c_int
        ) = "cuOccupancyAvailableDynamicSMemPerBlock" since 10020, leave;
        fn cuOccupancyMaxPotentialClusterSize(
            clusterSize: *mut c_int, func: CUfunction, config: *const CUlaunchConfig
        ) = "cuOccupancyMaxPotentialClusterSize" since 11070, leave;
        fn cuOccupancyMaxActiveClusters(
            numClusters: *mut c_int, func: CUfunction, config: *const CUlaunchConfig
        ) = "cuOccupancyMaxActiveClusters" since 11070, leave;

        // Texture references
        fn cuTexRefSetArray(hTexRef: CUtexref, hArray: CUarray, Flags: c_uint)
            = "cuTexRefSetArray" since 2000, leave;
        fn cuTexRefSetMipmappedArray(hTexRef: CUtexref, hMipmappedArray: CUmipmappedArray, Flags: c_uint)
            = "cuTexRefSetMipmappedArray" since 5000, leave;
        fn cuTexRefSetAddress_v2(ByteOffset: *mut usize, hTexRef: CUtexref, dptr: CUdeviceptr, bytes: usize)
            = "cuTexRefSetAddress" since 3020, gate;
        fn cuTexRefSetAddress2D_v3(
            hTexRef: CUtexref, desc: *const CUDA_ARRAY_DESCRIPTOR, dptr: CUdeviceptr, Pitch: usize
        ) = "cuTexRefSetAddress2D" since 4010, gate;
        fn cuTexRefSetFormat(hTexRef: CUtexref, fmt: CUarray_format, NumPackedComponents: c_int)
            = "cuTexRefSetFormat" since 2000, leave;
        fn cuTexRefSetAddressMode(hTexRef: CUtexref, dim: c_int, am: CUaddress_mode)
            = "cuTexRefSetAddressMode" since 2000, leave;
        fn cuTexRefSetFilterMode(hTexRef: CUtexref, fm: CUfilter_mode)
            = "cuTexRefSetFilterMode" since 2000, leave;
        fn cuTexRefSetMipmapFilterMode(hTexRef: CUtexref, fm: CUfilter_mode)
            = "cuTexRefSetMipmapFilterMode" since 5000, leave;
        fn cuTexRefSetMipmapLevelBias(hTexRef: CUtexref, bias: f32)
            = "cuTexRefSetMipmapLevelBias" since 5000, leave;
        fn cuTexRefSetMipmapLevelClamp(hTexRef: CUtexref, minMipmapLevelClamp: f32, maxMipmapLevelClamp: f32)
            = "cuTexRefSetMipmapLevelClamp" since 5000, leave;
        fn cuTexRefSetMaxAnisotropy(hTexRef: CUtexref, maxAniso: c_uint)
            = "cuTexRefSetMaxAnisotropy" since 5000, leave;
        fn cuTexRefSetBorderColor(hTexRef: CUtexref, pBorderColor: *mut f32)
            = "cuTexRefSetBorderColor" since 8000, leave;
        fn cuTexRefSetFlags(hTexRef: CUtexref, Flags: c_uint) = "cuTexRefSetFlags" since 2000, leave;
        fn cuTexRefGetAddress_v2(pdptr: *mut CUdeviceptr, hTexRef: CUtexref)
            = "cuTexRefGetAddress" since 3020, leave;
        fn cuTexRefGetArray(phArray: *mut CUarray, hTexRef: CUtexref) = "cuTexRefGetArray" since 2000, leave;
        fn cuTexRefGetMipmappedArray(phMipmappedArray: *mut CUmipmappedArray, hTexRef: CUtexref)
            = "cuTexRefGetMipmappedArray" since 5000, leave;
        fn cuTexRefGetAddressMode(pam: *mut CUaddress_mode, hTexRef: CUtexref, dim: c_int)
            = "cuTexRefGetAddressMode" since 2000, leave;
        fn cuTexRefGetFilterMode(pfm: *mut CUfilter_mode, hTexRef: CUtexref)
            = "cuTexRefGetFilterMode" since 2000, leave;
        fn cuTexRefGetFormat(pFormat: *mut CUarray_format, pNumChannels: *mut c_int, hTexRef: CUtexref)
            = "cuTexRefGetFormat" since 2000, leave;
        fn cuTexRefGetMipmapFilterMode(pfm: *mut CUfilter_mode, hTexRef: CUtexref)
            = "cuTexRefGetMipmapFilterMode" since 5000, leave;
        fn cuTexRefGetMipmapLevelBias(pbias: *mut f32, hTexRef: CUtexref)
            = "cuTexRefGetMipmapLevelBias" since 5000, leave;
        fn cuTexRefGetMipmapLevelClamp(
            pminMipmapLevelClamp: *mut f32, pmaxMipmapLevelClamp: *mut f32, hTexRef: CUtexref
        ) = "cuTexRefGetMipmapLevelClamp" since 5000, leave;
        fn cuTexRefGetMaxAnisotropy(pmaxAniso: *mut c_int, hTexRef: CUtexref)
            = "cuTexRefGetMaxAnisotropy" since 5000, leave;
        fn cuTexRefGetBorderColor(pBorderColor: *mut f32, hTexRef: CUtexref)
            = "cuTexRefGetBorderColor" since 8000, leave;
        fn cuTexRefGetFlags(pFlags: *mut c_uint, hTexRef: CUtexref) = "cuTexRefGetFlags" since 2000, leave;
        fn cuTexRefCreate(pTexRef: *mut CUtexref) = "cuTexRefCreate" since 2000, leave;
        fn cuTexRefDestroy(hTexRef: CUtexref) = "cuTexRefDestroy" since 2000, leave;

        // Surface references
        fn cuSurfRefSetArray(hSurfRef: CUsurfref, hArray: CUarray, Flags: c_uint)
            = "cuSurfRefSetArray" since 3000, leave;
        fn cuSurfRefGetArray(phArray: *mut CUarray, hSurfRef: CUsurfref)
            = "cuSurfRefGetArray" since 3000, leave;

        // Texture objects
        fn cuTexObjectCreate(
            pTexObject: *mut CUtexObject, pResDesc: *const CUDA_RESOURCE_DESC,
            pTexDesc: *const CUDA_TEXTURE_DESC, pResViewDesc: *const CUDA_RESOURCE_VIEW_DESC
        ) = "cuTexObjectCreate" since 5000, gate;
        fn cuTexObjectDestroy(texObject: CUtexObject) = "cuTexObjectDestroy" since 5000, leave;
        fn cuTexObjectGetResourceDesc(pResDesc: *mut CUDA_RESOURCE_DESC, texObject: CUtexObject)
            = "cuTexObjectGetResourceDesc" since 5000, leave;
        fn cuTexObjectGetTextureDesc(pTexDesc: *mut CUDA_TEXTURE_DESC, texObject: CUtexObject)
            = "cuTexObjectGetTextureDesc" since 5000, leave;
        fn cuTexObjectGetResourceViewDesc(pResViewDesc: *mut CUDA_RESOURCE_VIEW_DESC, texObject: CUtexObject)
            = "cuTexObjectGetResourceViewDesc" since 5000, leave;

        // Surface objects
        fn cuSurfObjectCreate(pSurfObject: *mut CUsurfObject, pResDesc: *const CUDA_RESOURCE_DESC)
            = "cuSurfObjectCreate" since 5000, gate;
        fn cuSurfObjectDestroy(surfObject: CUsurfObject) = "cuSurfObjectDestroy" since 5000, leave;
        fn cuSurfObjectGetResourceDesc(pResDesc: *mut CUDA_RESOURCE_DESC, surfObject: CUsurfObject)
            = "cuSurfObjectGetResourceDesc" since 5000, leave;

        // Tensor maps
        fn cuTensorMapEncodeTiled(
            tensorMap: *mut CUtensorMap, tensorDataType: CUtensorMapDataType, tensorRank: cuuint32_t,
            globalAddress: *mut c_void, globalDim: *const cuuint64_t, globalStrides: *const cuuint64_t,
            boxDim: *const cuuint32_t, elementStrides: *const cuuint32_t, interleave: CUtensorMapInterleave,
            swizzle: CUtensorMapSwizzle, l2Promotion: CUtensorMapL2promotion,
            oobFill: CUtensorMapFloatOOBfill
        ) = "cuTensorMapEncodeTiled" since 12000, leave;
        fn cuTensorMapEncodeIm2col(
            tensorMap: *mut CUtensorMap, tensorDataType: CUtensorMapDataType, tensorRank: cuuint32_t,
            globalAddress: *mut c_void, globalDim: *const cuuint64_t, globalStrides: *const cuuint64_t,
            pixelBoxLowerCorner: *const c_int, pixelBoxUpperCorner: *const c_int,
            channelsPerPixel: cuuint32_t, pixelsPerColumn: cuuint32_t, elementStrides: *const cuuint32_t,
            interleave: CUtensorMapInterleave, swizzle: CUtensorMapSwizzle,
            l2Promotion: CUtensorMapL2promotion, oobFill: CUtensorMapFloatOOBfill
        ) = "cuTensorMapEncodeIm2col" since 12000, leave;
        fn cuTensorMapEncodeIm2colWide(
            tensorMap: *mut CUtensorMap, tensorDataType: CUtensorMapDataType, tensorRank: cuuint32_t,
            globalAddress: *mut c_void, globalDim: *const cuuint64_t, globalStrides: *const cuuint64_t,
            pixelBoxLowerCornerWidth: c_int, pixelBoxUpperCornerWidth: c_int, channelsPerPixel: cuuint32_t,
            pixelsPerColumn: cuuint32_t, elementStrides: *const cuuint32_t, interleave: CUtensorMapInterleave,
            mode: CUtensorMapIm2ColWideMode, swizzle: CUtensorMapSwizzle, l2Promotion: CUtensorMapL2promotion,
            oobFill: CUtensorMapFloatOOBfill
        ) = "cuTensorMapEncodeIm2colWide" since 12080, leave;
        fn cuTensorMapReplaceAddress(tensorMap: *mut CUtensorMap, globalAddress: *mut c_void)
            = "cuTensorMapReplaceAddress" since 12000, leave;
        fn cuTensorMapSetAllocationClass(
            tensorMap: *mut CUtensorMap, allocClass: CUtensorMapAllocClass,
            outAllocClass: *mut CUtensorMapAllocClass
        ) = "cuTensorMapSetAllocationClass" since 13050, leave;

        // Peer access
        fn cuDeviceCanAccessPeer(canAccessPeer: *mut c_int, dev: CUdevice, peerDev: CUdevice)
            = "cuDeviceCanAccessPeer" since 4000, leave;
        fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: c_uint)
            = "cuCtxEnablePeerAccess" since 4000, virtualise;
        fn cuCtxDisablePeerAccess(peerContext: CUcontext) = "cuCtxDisablePeerAccess" since 4000, virtualise;
        fn cuDeviceGetP2PAttribute(
            value: *mut c_int, attrib: CUdevice_P2PAttribute, srcDevice: CUdevice, dstDevice: CUdevice
        ) = "cuDeviceGetP2PAttribute" since 8000, leave;
        fn cuDeviceGetP2PAtomicCapabilities(
            capabilities: *mut c_uint, operations: *const CUatomicOperation, count: c_uint,
            srcDevice: CUdevice, dstDevice: CUdevice
        ) = "cuDeviceGetP2PAtomicCapabilities" since 13000, leave;

        // Graphics interoperability
        fn cuGraphicsUnregisterResource(resource: CUgraphicsResource)
            = "cuGraphicsUnregisterResource" since 3000, taint;
        fn cuGraphicsSubResourceGetMappedArray(
            pArray: *mut CUarray, resource: CUgraphicsResource, arrayIndex: c_uint, mipLevel: c_uint
        ) = "cuGraphicsSubResourceGetMappedArray" since 3000, leave;
        fn cuGraphicsResourceGetMappedMipmappedArray(
            pMipmappedArray: *mut CUmipmappedArray, resource: CUgraphicsResource
        ) = "cuGraphicsResourceGetMappedMipmappedArray" since 5000, leave;
        fn cuGraphicsResourceGetMappedPointer_v2(
            pDevPtr: *mut CUdeviceptr, pSize: *mut usize, resource: CUgraphicsResource
        ) = "cuGraphicsResourceGetMappedPointer" since 3020, leave;
        fn cuGraphicsResourceSetMapFlags_v2(resource: CUgraphicsResource, flags: c_uint)
            = "cuGraphicsResourceSetMapFlags" since 6050, taint;
        fn cuGraphicsMapResources(count: c_uint, resources: *mut CUgraphicsResource, hStream: CUstream)
            = "cuGraphicsMapResources" since 3000, taint, per_thread cuGraphicsMapResources_ptsz since 7000;
        fn cuGraphicsUnmapResources(
            count: c_uint, resources: *mut CUgraphicsResource, hStream: CUstream
        ) = "cuGraphicsUnmapResources" since 3000, taint, per_thread cuGraphicsUnmapResources_ptsz since 7000;

        // Entry points
        fn cuGetProcAddress(
            symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: cuuint64_t
        ) = "cuGetProcAddress" since 11030, virtualise;
        fn cuGetProcAddress_v2(
            symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: cuuint64_t,
            symbolStatus: *mut CUdriverProcAddressQueryResult
        ) = "cuGetProcAddress" since 12000, virtualise;
        fn cuGetExportTable(ppExportTable: *mut *const c_void, pExportTableId: *const CUuuid)
            = "cuGetExportTable" since 3000, track;

        // Core dumps
        fn cuCoredumpGetAttribute(attrib: CUcoredumpSettings, value: *mut c_void, size: *mut usize)
            = "cuCoredumpGetAttribute" since 12010, leave;
        fn cuCoredumpGetAttributeGlobal(attrib: CUcoredumpSettings, value: *mut c_void, size: *mut usize)
            = "cuCoredumpGetAttributeGlobal" since 12010, leave;
        fn cuCoredumpSetAttribute(attrib: CUcoredumpSettings, value: *mut c_void, size: *mut usize)
            = "cuCoredumpSetAttribute" since 12010, leave;
        fn cuCoredumpSetAttributeGlobal(attrib: CUcoredumpSettings, value: *mut c_void, size: *mut usize)
            = "cuCoredumpSetAttributeGlobal" since 12010, leave;
        fn cuCoredumpRegisterStartCallback(
            callback: CUcoredumpStatusCallback, userData: *mut c_void,
            callbackOut: *mut CUcoredumpCallbackHandle
        ) = "cuCoredumpRegisterStartCallback" since 13020, leave;
        fn cuCoredumpRegisterCompleteCallback(
            callback: CUcoredumpStatusCallback, userData: *mut c_void,
            callbackOut: *mut CUcoredumpCallbackHandle
        ) = "cuCoredumpRegisterCompleteCallback" since 13020, leave;
        fn cuCoredumpDeregisterStartCallback(callback: CUcoredumpCallbackHandle)
            = "cuCoredumpDeregisterStartCallback" since 13020, leave;
        fn cuCoredumpDeregisterCompleteCallback(callback: CUcoredumpCallbackHandle)
            = "cuCoredumpDeregisterCompleteCallback" since 13020, leave;

        // Profiler
        fn cuProfilerInitialize(
            configFile: *const c_char, outputFile: *const c_char, outputMode: CUoutput_mode
        ) = "cuProfilerInitialize" since 4000, leave;
        fn cuProfilerStart() = "cuProfilerStart" since 4000, leave;
        fn cuProfilerStop() = "cuProfilerStop" since 4000, leave;

        // Green contexts
        fn cuGreenCtxCreate(phCtx: *mut CUgreenCtx, desc: CUdevResourceDesc, dev: CUdevice, flags: c_uint)
            = "cuGreenCtxCreate" since 12040, track;
        fn cuGreenCtxDestroy(hCtx: CUgreenCtx) = "cuGreenCtxDestroy" since 12040, track;
        fn cuCtxFromGreenCtx(pContext: *mut CUcontext, hCtx: CUgreenCtx)
            = "cuCtxFromGreenCtx" since 12040, track;
        fn cuDeviceGetDevResource(device: CUdevice, resource: *mut CUdevResource, type_: CUdevResourceType)
            = "cuDeviceGetDevResource" since 12040, leave;
        fn cuCtxGetDevResource(hCtx: CUcontext, resource: *mut CUdevResource, type_: CUdevResourceType)
            = "cuCtxGetDevResource" since 12040, leave;
        fn cuGreenCtxGetDevResource(hCtx: CUgreenCtx, resource: *mut CUdevResource, type_: CUdevResourceType)
            = "cuGreenCtxGetDevResource" since 12040, leave;
        fn cuDevSmResourceSplitByCount(
            result: *mut CUdevResource, nbGroups: *mut c_uint, input: *const CUdevResource,
            remainder: *mut CUdevResource, flags: c_uint, minCount: c_uint
        ) = "cuDevSmResourceSplitByCount" since 12040, leave;
        fn cuDevSmResourceSplit(
            result: *mut CUdevResource, nbGroups: c_uint, input: *const CUdevResource,
            remainder: *mut CUdevResource, flags: c_uint, groupParams: *mut CU_DEV_SM_RESOURCE_GROUP_PARAMS
        ) = "cuDevSmResourceSplit" since 13010, leave;
        fn cuDevResourceGenerateDesc(
            phDesc: *mut CUdevResourceDesc, resources: *mut CUdevResource, nbResources: c_uint
        ) = "cuDevResourceGenerateDesc" since 12040, leave;
        fn cuGreenCtxRecordEvent(hCtx: CUgreenCtx, hEvent: CUevent)
            = "cuGreenCtxRecordEvent" since 12040, gate;
        fn cuGreenCtxWaitEvent(hCtx: CUgreenCtx, hEvent: CUevent) = "cuGreenCtxWaitEvent" since 12040, gate;
        fn cuStreamGetGreenCtx(hStream: CUstream, phCtx: *mut CUgreenCtx)
            = "cuStreamGetGreenCtx" since 12040, leave;
        fn cuGreenCtxStreamCreate(
            phStream: *mut CUstream, greenCtx: CUgreenCtx, flags: c_uint, priority: c_int
        ) = "cuGreenCtxStreamCreate" since 12050, track;
        fn cuGreenCtxGetId(greenCtx: CUgreenCtx, greenCtxId: *mut c_ulonglong)
            = "cuGreenCtxGetId" since 12090, leave;
        fn cuStreamGetDevResource(hStream: CUstream, resource: *mut CUdevResource, type_: CUdevResourceType)
            = "cuStreamGetDevResource" since 13010, leave, per_thread cuStreamGetDevResource_ptsz since 13010;

        // Logs
        fn cuLogsRegisterCallback(
            callbackFunc: CUlogsCallback, userData: *mut c_void, callback_out: *mut CUlogsCallbackHandle
        ) = "cuLogsRegisterCallback" since 12090, leave;
        fn cuLogsUnregisterCallback(callback: CUlogsCallbackHandle)
            = "cuLogsUnregisterCallback" since 12090, leave;
        fn cuLogsCurrent(iterator_out: *mut CUlogIterator, flags: c_uint)
            = "cuLogsCurrent" since 12090, leave;
        fn cuLogsDumpToFile(iterator: *mut CUlogIterator, pathToFile: *const c_char, flags: c_uint)
            = "cuLogsDumpToFile" since 12090, leave;
        fn cuLogsDumpToMemory(
            iterator: *mut CUlogIterator, buffer: *mut c_char, size: *mut usize, flags: c_uint
        ) = "cuLogsDumpToMemory" since 12090, leave;

        // Checkpointing
        fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, tid: *mut c_int)
            = "cuCheckpointProcessGetRestoreThreadId" since 12080, leave;
        fn cuCheckpointProcessGetState(pid: c_int, state: *mut CUprocessState)
            = "cuCheckpointProcessGetState" since 12080, leave;
        fn cuCheckpointProcessLock(pid: c_int, args: *mut CUcheckpointLockArgs)
            = "cuCheckpointProcessLock" since 12080, taint;
        fn cuCheckpointProcessCheckpoint(pid: c_int, args: *mut CUcheckpointCheckpointArgs)
            = "cuCheckpointProcessCheckpoint" since 12080, taint;
        fn cuCheckpointProcessRestore(pid: c_int, args: *mut CUcheckpointRestoreArgs)
            = "cuCheckpointProcessRestore" since 12080, taint;
        fn cuCheckpointOperationComplete(handle: CUcheckpointOperationHandle)
            = "cuCheckpointOperationComplete" since 13040, taint;
        fn cuCheckpointProcessUnlock(pid: c_int, args: *mut CUcheckpointUnlockArgs)
            = "cuCheckpointProcessUnlock" since 12080, taint;

        // OpenGL
        fn cuGLMapBufferObject_v2(dptr: *mut CUdeviceptr, size: *mut usize, buffer: c_uint)
            = "cuGLMapBufferObject" since 3020, taint, per_thread cuGLMapBufferObject_v2_ptds since 7000;
        fn cuGLMapBufferObjectAsync_v2(
            dptr: *mut CUdeviceptr, size: *mut usize, buffer: c_uint, hStream: CUstream
        ) = "cuGLMapBufferObjectAsync" since 3020, taint,
            per_thread cuGLMapBufferObjectAsync_v2_ptsz since 7000;

        // Without a signature

        // Devices
        legacy cuDeviceTotalMem = "cuDeviceTotalMem" since 2000;

        // Primary contexts
        legacy cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease" since 7000;
        legacy cuDevicePrimaryCtxSetFlags = "cuDevicePrimaryCtxSetFlags" since 7000;
        legacy cuDevicePrimaryCtxReset = "cuDevicePrimaryCtxReset" since 7000;

        // Contexts
        legacy cuCtxCreate = "cuCtxCreate" since 2000;
        legacy cuCtxDestroy = "cuCtxDestroy" since 2000;
        legacy cuCtxPushCurrent = "cuCtxPushCurrent" since 2000;
        legacy cuCtxPopCurrent = "cuCtxPopCurrent" since 2000;

        // Modules, linking
        legacy cuModuleGetGlobal = "cuModuleGetGlobal" since 2000;
        legacy cuLinkCreate = "cuLinkCreate" since 5050;
        legacy cuLinkAddData = "cuLinkAddData" since 5050;
        legacy cuLinkAddFile = "cuLinkAddFile" since 5050;

        // Memory: allocation, copies, memsets, arrays, IPC
        legacy cuMemGetInfo = "cuMemGetInfo" since 2000;
        legacy cuMemAlloc = "cuMemAlloc" since 2000;
        legacy cuMemAllocPitch = "cuMemAllocPitch" since 2000;
        legacy cuMemFree = "cuMemFree" since 2000;
        legacy cuMemGetAddressRange = "cuMemGetAddressRange" since 2000;
        legacy cuMemGetAttribute = "" since 0;
        legacy cuMemGetAttribute_v2 = "" since 0;
        legacy cuMemAllocHost = "cuMemAllocHost" since 2000;
        legacy cuMemHostGetDevicePointer = "cuMemHostGetDevicePointer" since 2020;
        legacy cuMemHostRegister = "cuMemHostRegister" since 4000;
        legacy cuMemcpyHtoD = "cuMemcpyHtoD" since 2000;
        legacy cuMemcpyDtoH = "cuMemcpyDtoH" since 2000;
        legacy cuMemcpyDtoD = "cuMemcpyDtoD" since 2000;
        legacy cuMemcpyDtoA = "cuMemcpyDtoA" since 2000;
        legacy cuMemcpyAtoD = "cuMemcpyAtoD" since 2000;
        legacy cuMemcpyHtoA = "cuMemcpyHtoA" since 2000;
        legacy cuMemcpyAtoH = "cuMemcpyAtoH" since 2000;
        legacy cuMemcpyAtoA = "cuMemcpyAtoA" since 2000;
        legacy cuMemcpy2D = "cuMemcpy2D" since 2000;
        legacy cuMemcpy2DUnaligned = "cuMemcpy2DUnaligned" since 2000;
        legacy cuMemcpy3D = "cuMemcpy3D" since 2000;
        legacy cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync" since 2000;
        legacy cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync" since 2000;
        legacy cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync" since 3000;
        legacy cuMemcpyHtoAAsync = "cuMemcpyHtoAAsync" since 2000;
        legacy cuMemcpyAtoHAsync = "cuMemcpyAtoHAsync" since 2000;
        legacy cuMemcpy2DAsync = "cuMemcpy2DAsync" since 2000;
        legacy cuMemcpy3DAsync = "cuMemcpy3DAsync" since 2000;
        legacy cuMemsetD8 = "cuMemsetD8" since 2000;
        legacy cuMemsetD16 = "cuMemsetD16" since 2000;
        legacy cuMemsetD32 = "cuMemsetD32" since 2000;
        legacy cuMemsetD2D8 = "cuMemsetD2D8" since 2000;
        legacy cuMemsetD2D16 = "cuMemsetD2D16" since 2000;
        legacy cuMemsetD2D32 = "cuMemsetD2D32" since 2000;
        legacy cuArrayCreate = "cuArrayCreate" since 2000;
        legacy cuArrayGetDescriptor = "cuArrayGetDescriptor" since 2000;
        legacy cuArray3DCreate = "cuArray3DCreate" since 2000;
        legacy cuArray3DGetDescriptor = "cuArray3DGetDescriptor" since 2000;

        // Streams, capture
        legacy cuStreamDestroy = "cuStreamDestroy" since 2000;

        // Events
        legacy cuEventDestroy = "cuEventDestroy" since 2000;

        // Graphs
        legacy cuGraphInstantiate = "cuGraphInstantiate" since 10000;

        // Texture references
        legacy cuTexRefSetAddress = "cuTexRefSetAddress" since 2000;
        legacy cuTexRefSetAddress2D = "cuTexRefSetAddress2D" since 2020;
        legacy cuTexRefSetAddress2D_v2 = "cuTexRefSetAddress2D" since 3020;
        legacy cuTexRefGetAddress = "cuTexRefGetAddress" since 2000;

        // Graphics interoperability
        legacy cuGraphicsResourceGetMappedPointer = "cuGraphicsResourceGetMappedPointer" since 3000;
        legacy cuGraphicsResourceSetMapFlags = "cuGraphicsResourceSetMapFlags" since 3000;

        // EGL
        legacy cuEGLStreamConsumerAcquireFrame = "cuEGLStreamConsumerAcquireFrame" since 7000;
        legacy cuEGLStreamConsumerConnect = "cuEGLStreamConsumerConnect" since 7000;
        legacy cuEGLStreamConsumerConnectWithFlags = "cuEGLStreamConsumerConnectWithFlags" since 8000;
        legacy cuEGLStreamConsumerDisconnect = "cuEGLStreamConsumerDisconnect" since 7000;
        legacy cuEGLStreamConsumerReleaseFrame = "cuEGLStreamConsumerReleaseFrame" since 7000;
        legacy cuEGLStreamProducerConnect = "cuEGLStreamProducerConnect" since 7000;
        legacy cuEGLStreamProducerDisconnect = "cuEGLStreamProducerDisconnect" since 7000;
        legacy cuEGLStreamProducerPresentFrame = "cuEGLStreamProducerPresentFrame" since 7000;
        legacy cuEGLStreamProducerReturnFrame = "cuEGLStreamProducerReturnFrame" since 7000;
        legacy cuEGLApiInit = "" since 0;
        legacy cuEventCreateFromEGLSync = "" since 0;
        legacy cuGraphicsEGLRegisterImage = "cuGraphicsEGLRegisterImage" since 7000;
        legacy cuGraphicsResourceGetMappedEglFrame = "cuGraphicsResourceGetMappedEglFrame" since 7000;

        // OpenGL
        legacy cuGLCtxCreate = "cuGLCtxCreate" since 2000;
        legacy cuGLCtxCreate_v2 = "cuGLCtxCreate" since 3020;
        legacy cuGLGetDevices = "cuGLGetDevices" since 4010;
        legacy cuGLGetDevices_v2 = "cuGLGetDevices" since 6050;
        legacy cuGLInit = "cuGLInit" since 2000;
        legacy cuGLMapBufferObject = "cuGLMapBufferObject" since 2000;
        legacy cuGLMapBufferObjectAsync = "cuGLMapBufferObjectAsync" since 2030;
        legacy cuGLRegisterBufferObject = "cuGLRegisterBufferObject" since 2000;
        legacy cuGLSetBufferObjectMapFlags = "cuGLSetBufferObjectMapFlags" since 2030;
        legacy cuGLUnmapBufferObject = "cuGLUnmapBufferObject" since 2000;
        legacy cuGLUnmapBufferObjectAsync = "cuGLUnmapBufferObjectAsync" since 2030;
        legacy cuGLUnregisterBufferObject = "cuGLUnregisterBufferObject" since 2000;
        legacy cuGraphicsGLRegisterBuffer = "cuGraphicsGLRegisterBuffer" since 3000;
        legacy cuGraphicsGLRegisterImage = "cuGraphicsGLRegisterImage" since 3000;

        // VDPAU
        legacy cuGraphicsVDPAURegisterOutputSurface = "cuGraphicsVDPAURegisterOutputSurface" since 3010;
        legacy cuGraphicsVDPAURegisterVideoSurface = "cuGraphicsVDPAURegisterVideoSurface" since 3010;
        legacy cuVDPAUCtxCreate = "cuVDPAUCtxCreate" since 3010;
        legacy cuVDPAUCtxCreate_v2 = "cuVDPAUCtxCreate" since 3020;
        legacy cuVDPAUGetDevice = "cuVDPAUGetDevice" since 3010;
    } };
}
