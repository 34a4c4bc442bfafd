//! Interception of two of NVIDIA's libraries that use the driver beside `libcuda.so.1`.
//!
//! | library | what is done |
//! |---|---|
//! | NVML (`libnvidia-ml.so.1`): GPU monitors | calls wait at the gate: the driver's checkpoint takes NVML's device files away |
//! | CUPTI (`libcupti.so.*`): profilers | the same, and whether one is attached is recorded, see `cupti` |
//!
//! Each function is exported under its name, and `dlsym` hands the export out ([`substitute`]). All have at most six
//! parameters, none of which is a floating-point number, so that one stub serves them: it keeps the six registers for
//! parameters in memory and passes them on. NVML's functions that do not use the driver are not among them
//! (nvmlErrorString, nvmlSystemGetNVMLVersion), nor those that wait for an event for as long as the program likes
//! (nvmlEventSetWait), nor those for the hosts of virtual machines. A test compares them with the names in NVIDIA's bindings
//! for Python.
//!
//! The names are those of NVIDIA's `nvml.h` as of NVML 13, and of `cupti_callbacks.h`, `cupti_activity.h`.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicBool, AtomicPtr,
    Ordering::{Relaxed, SeqCst},
};

use super::{elf, gate};

pub(super) mod cupti;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Library {
    Nvml,
    Cupti,
}

impl Library {
    /// What the name of its file begins with.
    fn stem(self) -> &'static str {
        match self {
            Self::Nvml => "libnvidia-ml.so",
            Self::Cupti => "libcupti.so",
        }
    }

    /// The answer of a function that is called although its library is missing.
    fn missing(self) -> usize {
        match self {
            // NVML_ERROR_LIBRARY_NOT_FOUND.
            Self::Nvml => 12,
            // CUPTI_ERROR_NOT_INITIALIZED.
            Self::Cupti => 15,
        }
    }
}

struct Function {
    library: Library,
    name: &'static CStr,
    stub: Address,
    /// The library's own function; null while it was not looked for.
    real: AtomicPtr<c_void>,
}

/// The address of a stub: nothing is ever read through it.
struct Address(*const c_void);

// SAFETY: it is only used as a number.
unsafe impl Sync for Address {}

/// The parameters of a call, as far as it has any.
type Parameters = [usize; 6];

macro_rules! export {
    ($( $library:ident { $($name:ident)* } )*) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names, reason = "NVIDIA's names")]
        #[repr(u32)]
        enum Index { $( $( $name, )* )* Count }

        static FUNCTIONS: [Function; Index::Count as usize] = [$( $( Function {
            library: Library::$library,
            name: match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name with a NUL"),
            },
            stub: Address($name as *const c_void),
            real: AtomicPtr::new(null_mut()),
        }, )* )*];

        $( $(
            #[doc = concat!("In front of the library's `", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As for the library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "mov eax, {index}",
                    "jmp {stub}",
                    index = const Index::$name as u32,
                    stub = sym stub,
                )
            }
        )* )*
    };
}

export! {
    Nvml {
        nvmlComputeInstanceDestroy nvmlComputeInstanceGetInfo nvmlComputeInstanceGetInfo_v2
        nvmlDeviceClearAccountingPids nvmlDeviceClearCpuAffinity nvmlDeviceClearEccErrorCounts
        nvmlDeviceClearFieldValues nvmlDeviceCreateGpuInstance nvmlDeviceCreateGpuInstanceWithPlacement
        nvmlDeviceDiscoverGpus nvmlDeviceFreezeNvLinkUtilizationCounter nvmlDeviceGetAPIRestriction
        nvmlDeviceGetAccountingBufferSize nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingPids
        nvmlDeviceGetAccountingStats nvmlDeviceGetAccountingStats_v2 nvmlDeviceGetAdaptiveClockInfoStatus
        nvmlDeviceGetAdaptiveTgpModeInfo_v1 nvmlDeviceGetAddressingMode nvmlDeviceGetApplicationsClock
        nvmlDeviceGetArchitecture nvmlDeviceGetAttributes nvmlDeviceGetAttributes_v2
        nvmlDeviceGetAutoBoostedClocksEnabled nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetBBXTimeData_v1
        nvmlDeviceGetBankRemapperStatus_v1 nvmlDeviceGetBoardId nvmlDeviceGetBoardPartNumber
        nvmlDeviceGetBrand nvmlDeviceGetBridgeChipInfo nvmlDeviceGetBusType nvmlDeviceGetC2cModeInfoV
        nvmlDeviceGetCapabilities nvmlDeviceGetClkMonStatus nvmlDeviceGetClock nvmlDeviceGetClockInfo
        nvmlDeviceGetClockOffsets nvmlDeviceGetComputeInstanceId nvmlDeviceGetComputeMode
        nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2
        nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetConfComputeGpuAttestationReport
        nvmlDeviceGetConfComputeGpuCertificate nvmlDeviceGetConfComputeMemSizeInfo
        nvmlDeviceGetConfComputeProtectedMemoryUsage nvmlDeviceGetCoolerInfo nvmlDeviceGetCount
        nvmlDeviceGetCount_v2 nvmlDeviceGetCpuAffinity nvmlDeviceGetCpuAffinityWithinScope
        nvmlDeviceGetCudaComputeCapability nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth
        nvmlDeviceGetCurrentClockFreqs nvmlDeviceGetCurrentClocksEventReasons
        nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetDecoderUtilization
        nvmlDeviceGetDefaultApplicationsClock nvmlDeviceGetDefaultEccMode nvmlDeviceGetDetailedEccErrors
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle nvmlDeviceGetDisplayActive nvmlDeviceGetDisplayMode
        nvmlDeviceGetDramEncryptionMode nvmlDeviceGetDriverModel nvmlDeviceGetDriverModel_v2
        nvmlDeviceGetDynamicPstatesInfo nvmlDeviceGetEccMode nvmlDeviceGetEncoderCapacity
        nvmlDeviceGetEncoderSessions nvmlDeviceGetEncoderStats nvmlDeviceGetEncoderUtilization
        nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetFBCSessions nvmlDeviceGetFBCStats
        nvmlDeviceGetFanControlPolicy_v2 nvmlDeviceGetFanSpeed nvmlDeviceGetFanSpeedRPM
        nvmlDeviceGetFanSpeed_v2 nvmlDeviceGetFieldValues nvmlDeviceGetGpcClkMinMaxVfOffset
        nvmlDeviceGetGpcClkVfOffset nvmlDeviceGetGpuFabricInfo nvmlDeviceGetGpuFabricInfoV
        nvmlDeviceGetGpuFabricInfo_v4 nvmlDeviceGetGpuInstanceById nvmlDeviceGetGpuInstanceId
        nvmlDeviceGetGpuInstancePossiblePlacements nvmlDeviceGetGpuInstancePossiblePlacements_v2
        nvmlDeviceGetGpuInstanceProfileInfo nvmlDeviceGetGpuInstanceProfileInfoByIdV
        nvmlDeviceGetGpuInstanceProfileInfoV nvmlDeviceGetGpuInstanceRemainingCapacity
        nvmlDeviceGetGpuInstances nvmlDeviceGetGpuMaxPcieLinkGeneration nvmlDeviceGetGpuOperationMode
        nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v2
        nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetGridLicensableFeatures
        nvmlDeviceGetGridLicensableFeatures_v2 nvmlDeviceGetGridLicensableFeatures_v3
        nvmlDeviceGetGridLicensableFeatures_v4 nvmlDeviceGetGspFirmwareMode nvmlDeviceGetGspFirmwareVersion
        nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetHandleByPciBusId
        nvmlDeviceGetHandleByPciBusId_v2 nvmlDeviceGetHandleBySerial nvmlDeviceGetHandleByUUID
        nvmlDeviceGetHandleByUUIDV nvmlDeviceGetHostname_v1 nvmlDeviceGetIndex
        nvmlDeviceGetInforomConfigurationChecksum nvmlDeviceGetInforomImageVersion nvmlDeviceGetInforomVersion
        nvmlDeviceGetIrqNum nvmlDeviceGetJpgUtilization nvmlDeviceGetLastBBXFlushTime
        nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetMPSComputeRunningProcesses_v2
        nvmlDeviceGetMPSComputeRunningProcesses_v3 nvmlDeviceGetMarginTemperature nvmlDeviceGetMaxClockInfo
        nvmlDeviceGetMaxCustomerBoostClock nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMaxPcieLinkGeneration
        nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetMemClkMinMaxVfOffset nvmlDeviceGetMemClkVfOffset
        nvmlDeviceGetMemoryAffinity nvmlDeviceGetMemoryBusWidth nvmlDeviceGetMemoryErrorCounter
        nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetMemoryLimits_v1
        nvmlDeviceGetMigDeviceHandleByIndex nvmlDeviceGetMigMode nvmlDeviceGetMinMaxClockOfPState
        nvmlDeviceGetMinMaxFanSpeed nvmlDeviceGetMinorNumber nvmlDeviceGetModuleId nvmlDeviceGetMultiGpuBoard
        nvmlDeviceGetName nvmlDeviceGetNumFans nvmlDeviceGetNumGpuCores nvmlDeviceGetNumaNodeId
        nvmlDeviceGetNvLinkCapability nvmlDeviceGetNvLinkErrorCounter nvmlDeviceGetNvLinkInfo
        nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo
        nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkTelemetrySamples_v1
        nvmlDeviceGetNvLinkUtilizationControl nvmlDeviceGetNvLinkUtilizationCounter nvmlDeviceGetNvLinkVersion
        nvmlDeviceGetNvlinkBwMode nvmlDeviceGetNvlinkSupportedBwModes nvmlDeviceGetOfaUtilization
        nvmlDeviceGetP2PStatus nvmlDeviceGetPciInfo nvmlDeviceGetPciInfoExt nvmlDeviceGetPciInfo_v2
        nvmlDeviceGetPciInfo_v3 nvmlDeviceGetPcieLinkMaxSpeed nvmlDeviceGetPcieReplayCounter
        nvmlDeviceGetPcieSpeed nvmlDeviceGetPcieThroughput nvmlDeviceGetPdi nvmlDeviceGetPerformanceModes
        nvmlDeviceGetPerformanceState nvmlDeviceGetPersistenceMode nvmlDeviceGetPgpuMetadataString
        nvmlDeviceGetPlatformInfo nvmlDeviceGetPowerManagementDefaultLimit nvmlDeviceGetPowerManagementLimit
        nvmlDeviceGetPowerManagementLimitConstraints nvmlDeviceGetPowerManagementMode
        nvmlDeviceGetPowerMizerMode_v1 nvmlDeviceGetPowerSource nvmlDeviceGetPowerState
        nvmlDeviceGetPowerUsage nvmlDeviceGetProcessUtilization nvmlDeviceGetProcessesUtilizationInfo
        nvmlDeviceGetRemappedRows nvmlDeviceGetRemappedRows_v2 nvmlDeviceGetRepairStatus
        nvmlDeviceGetRetiredPages nvmlDeviceGetRetiredPagesPendingStatus nvmlDeviceGetRetiredPages_v2
        nvmlDeviceGetRowRemapperHistogram nvmlDeviceGetRunningProcessDetailList nvmlDeviceGetSamples
        nvmlDeviceGetSerial nvmlDeviceGetSramEccErrorStatus nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts
        nvmlDeviceGetSupportedClocksEventReasons nvmlDeviceGetSupportedClocksThrottleReasons
        nvmlDeviceGetSupportedEventTypes nvmlDeviceGetSupportedGraphicsClocks
        nvmlDeviceGetSupportedMemoryClocks nvmlDeviceGetSupportedPerformanceStates nvmlDeviceGetTargetFanSpeed
        nvmlDeviceGetTemperature nvmlDeviceGetTemperatureThreshold nvmlDeviceGetTemperatureV
        nvmlDeviceGetThermalSettings nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetTopologyNearestGpus
        nvmlDeviceGetTotalEccErrors nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetUUID
        nvmlDeviceGetUnrepairableMemoryFlag_v1 nvmlDeviceGetUtilizationRates nvmlDeviceGetVbiosVersion
        nvmlDeviceGetViolationStatus nvmlDeviceGetVirtualizationMode nvmlDeviceIsMigDeviceHandle
        nvmlDeviceModifyDrainState nvmlDeviceOnSameBoard nvmlDevicePerfMetricsGetSamples_v1
        nvmlDevicePowerSmoothingActivatePresetProfile nvmlDevicePowerSmoothingSetState
        nvmlDevicePowerSmoothingUpdatePresetProfileParam nvmlDeviceQueryDrainState
        nvmlDeviceReadPRMCounters_v1 nvmlDeviceReadWritePRM_v1 nvmlDeviceRegisterEvents nvmlDeviceRemoveGpu
        nvmlDeviceRemoveGpu_v2 nvmlDeviceResetApplicationsClocks nvmlDeviceResetGpuLockedClocks
        nvmlDeviceResetMemoryLockedClocks nvmlDeviceResetNvLinkErrorCounters
        nvmlDeviceResetNvLinkUtilizationCounter nvmlDeviceSetAPIRestriction nvmlDeviceSetAccountingMode
        nvmlDeviceSetAdaptiveTgpMode_v1 nvmlDeviceSetApplicationsClocks nvmlDeviceSetAutoBoostedClocksEnabled
        nvmlDeviceSetClockOffsets nvmlDeviceSetComputeMode nvmlDeviceSetConfComputeUnprotectedMemSize
        nvmlDeviceSetCpuAffinity nvmlDeviceSetDefaultAutoBoostedClocksEnabled nvmlDeviceSetDefaultFanSpeed_v2
        nvmlDeviceSetDramEncryptionMode nvmlDeviceSetDriverModel nvmlDeviceSetEccMode
        nvmlDeviceSetFanControlPolicy nvmlDeviceSetFanSpeed_v2 nvmlDeviceSetGpcClkVfOffset
        nvmlDeviceSetGpuLockedClocks nvmlDeviceSetGpuOperationMode nvmlDeviceSetHostname_v1
        nvmlDeviceSetMemClkVfOffset nvmlDeviceSetMemoryLimits_v1 nvmlDeviceSetMemoryLockedClocks
        nvmlDeviceSetMigMode nvmlDeviceSetNvLinkDeviceLowPowerThreshold nvmlDeviceSetNvLinkUtilizationControl
        nvmlDeviceSetNvlinkBwMode nvmlDeviceSetNvlinkBwModeAsync_v1 nvmlDeviceSetPersistenceMode
        nvmlDeviceSetPowerManagementLimit nvmlDeviceSetPowerManagementLimit_v2 nvmlDeviceSetPowerMizerMode_v1
        nvmlDeviceSetRusdSettings_v1 nvmlDeviceSetTemperatureThreshold nvmlDeviceSetVirtualizationMode
        nvmlDeviceValidateInforom nvmlDeviceWorkloadPowerProfileClearRequestedProfiles
        nvmlDeviceWorkloadPowerProfileGetCurrentProfiles nvmlDeviceWorkloadPowerProfileGetProfilesInfo
        nvmlDeviceWorkloadPowerProfileSetRequestedProfiles nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1
        nvmlEventSetCreate nvmlEventSetFree nvmlEventSetGetContextCount_v1 nvmlEventSetGetContextData_v1
        nvmlEventSetGetContextInfo_v1 nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1
        nvmlEventSetRegisterGpuOperationalEvents_v1 nvmlGetExcludedDeviceCount
        nvmlGetExcludedDeviceInfoByIndex nvmlGpmMetricsGet nvmlGpmMigSampleGet nvmlGpmQueryDeviceSupport
        nvmlGpmQueryIfStreamingEnabled nvmlGpmSampleAlloc nvmlGpmSampleFree nvmlGpmSampleGet
        nvmlGpmSetStreamingEnabled nvmlGpuInstanceCreateComputeInstance
        nvmlGpuInstanceCreateComputeInstanceWithPlacement nvmlGpuInstanceDestroy
        nvmlGpuInstanceGetComputeInstanceById nvmlGpuInstanceGetComputeInstancePossiblePlacements
        nvmlGpuInstanceGetComputeInstanceProfileInfo nvmlGpuInstanceGetComputeInstanceProfileInfoV
        nvmlGpuInstanceGetComputeInstanceRemainingCapacity nvmlGpuInstanceGetComputeInstances
        nvmlGpuInstanceGetInfo nvmlInit nvmlInitWithFlags nvmlInit_v2 nvmlShutdown nvmlSystemEventSetCreate
        nvmlSystemEventSetFree nvmlSystemGetCPER_v1 nvmlSystemGetConfComputeCapabilities
        nvmlSystemGetConfComputeGpusReadyState nvmlSystemGetConfComputeKeyRotationThresholdInfo
        nvmlSystemGetConfComputeSettings nvmlSystemGetConfComputeState nvmlSystemGetCudaDriverVersion
        nvmlSystemGetCudaDriverVersion_v2 nvmlSystemGetDriverBranch nvmlSystemGetDriverVersion
        nvmlSystemGetHicVersion nvmlSystemGetNvlinkBwMode nvmlSystemGetProcessName nvmlSystemGetTopologyGpuSet
        nvmlSystemRegisterEvents nvmlSystemSetConfComputeGpusReadyState
        nvmlSystemSetConfComputeKeyRotationThresholdInfo nvmlSystemSetNvlinkBwMode nvmlUnitGetCount
        nvmlUnitGetDevices nvmlUnitGetFanSpeedInfo nvmlUnitGetHandleByIndex nvmlUnitGetLedState
        nvmlUnitGetPsuInfo nvmlUnitGetTemperature nvmlUnitGetUnitInfo nvmlUnitSetLedState
    }
    Cupti {
        cuptiSubscribe cuptiSubscribe_v2 cuptiUnsubscribe cuptiFinalize cuptiActivityEnable
        cuptiActivityEnableAndDump cuptiActivityEnableContext cuptiActivityDisable cuptiActivityDisableContext
    }
}

/// Calls the function whose index is in EAX, with its parameters in registers as they were passed.
#[unsafe(naked)]
unsafe extern "C" fn stub() {
    // The return address, the frame pointer and six registers: the stack is aligned.
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push r9", "push r8", "push rcx", "push rdx", "push rsi", "push rdi",
        "mov rdi, rsp",
        "mov esi, eax",
        "mov rdx, [rbp + 8]",
        "call {call}",
        "leave",
        "ret",
        call = sym call,
    )
}

/// Whether the program has called NVML: it may hold the driver's device files, or open them.
static NVML_IS_USED: AtomicBool = AtomicBool::new(false);

/// Calls the library's function, behind the gate. Returns its result.
///
/// # Safety
/// `parameters` are those of the program's call, made by the code at `caller`.
unsafe extern "C" fn call(parameters: *const Parameters, index: usize, caller: *const c_void) -> usize {
    type Real = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> usize;
    let function = &FUNCTIONS[index];
    // Before the gate: a checkpoint that closes it sees that there is a call to be held back from then on.
    if function.library == Library::Nvml {
        NVML_IS_USED.store(true, SeqCst);
    }
    let _inside = gate::enter_unseen();
    let address = function.find(caller);
    if address.is_null() {
        return function.library.missing();
    }
    // SAFETY: the address is that of a function of this name. It takes at most six integers or pointers, which the
    // calling convention passes in registers: those that it does not take it does not read.
    let real = unsafe { std::mem::transmute::<*mut c_void, Real>(address) };
    // SAFETY: `stub` passes the array that it has filled.
    let parameters = unsafe { *parameters };
    let [a, b, c, d, e, f] = parameters;
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(a, b, c, d, e, f) };
    if function.library == Library::Cupti && result as u32 == cupti::SUCCESS {
        // SAFETY: as above; the call has succeeded.
        unsafe { cupti::called(function.name, &parameters) };
    }
    result
}

/// Whether the program has called NVML since its start.
pub(super) fn nvml_is_used() -> bool {
    NVML_IS_USED.load(SeqCst)
}

impl Function {
    /// The function that the code at `caller` would have called without us; null if there is none.
    fn find(&self, caller: *const c_void) -> *mut c_void {
        let known = self.real.load(Relaxed);
        if !known.is_null() {
            return known;
        }
        if self.library == Library::Cupti {
            // A library that contains CUPTI uses its own.
            let own = elf::function_beside(caller, self.name);
            if !own.is_null() {
                return own.cast_mut();
            }
        }
        let found = elf::function(&[self.library.stem()], self.name).cast_mut();
        self.real.store(found, Relaxed);
        found
    }

    /// Whether an address lies in the library.
    fn lies_in_library(&self, address: *const c_void) -> bool {
        let library = elf::library_of(address).filter(|library| !library.dli_fname.is_null());
        library.is_some_and(|library| {
            // SAFETY: the name of a loaded library is a NUL-terminated string that lives as long as the library.
            let path = unsafe { CStr::from_ptr(library.dli_fname) }.to_bytes();
            let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
            file.starts_with(self.library.stem().as_bytes())
        })
    }
}

fn ours(name: &CStr) -> Option<&'static Function> {
    let bytes = name.to_bytes();
    // Nearly everything that is looked up in a process has another beginning.
    if !bytes.starts_with(b"nvml") && !bytes.starts_with(b"cupti") {
        return None;
    }
    FUNCTIONS.iter().find(|function| function.name == name)
}

/// Whether dlsym is to ask here for a name.
pub(super) fn concerns_us(name: &CStr) -> bool {
    ours(name).is_some()
}

/// Whether what was found is our own function of that name.
pub(super) fn is_ours(found: *const c_void, name: &CStr) -> bool {
    ours(name).is_some_and(|function| function.stub.0 == found)
}

/// What a program gets that has looked `name` up, in a scope or in one library, and would have got `found`: our function
/// if that is the library's. A copy of CUPTI in another library is not intercepted when it is found like this.
pub(super) fn substitute(name: &CStr, found: *mut c_void, is_scope: bool) -> *mut c_void {
    let Some(function) = ours(name) else { return found };
    let ours = function.stub.0.cast_mut();
    if found.is_null() || found == ours {
        // Our own export stands in a scope in which the library may be missing, or the scope is the caller's own.
        let is_there = is_scope && !elf::function(&[function.library.stem()], name).is_null();
        return if is_there { ours } else { null_mut() };
    }
    if !function.lies_in_library(found) {
        return found;
    }
    // The library may have been loaded anew since the last time.
    function.real.store(found, Relaxed);
    ours
}
