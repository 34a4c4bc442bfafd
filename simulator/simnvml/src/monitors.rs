//! What monitors ask of a GPU beside its memory and its programs: an idle H100 without MIG. What such a GPU does not have is
//! not supported, as with NVIDIA's.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as sys;
use simcuda_machine::bus;

use super::{
    Code, Device, INVALID, NOT_FOUND, NOT_SUPPORTED, OK, UNKNOWN, WRONG_VERSION, bus_text, known, machine,
    processes, release, write, write_list, write_text,
};

/// The PCI IDs of an H100 SXM5: device and vendor.
const PCI_DEVICE_ID: c_uint = 0x2330_10de;
const PCI_SUBSYSTEM_ID: c_uint = 0x16c1_10de;
const BAR1_BYTES: u64 = 128 << 30;
const BAR1_USED_BYTES: u64 = 1 << 20;
/// How often the counters of the video engines are read, microseconds.
const VIDEO_SAMPLES_US: c_uint = 1_000_000;

/// Functions that give a number of a device.
macro_rules! numbers {
    ($( $name:ident $( [$kind:ident] )? : $ty:ty = $value:expr; )*) => {
        functions! {
            $( fn $name(device: Device, $( $kind: c_uint, )? out: *mut $ty) {
                known(device)?;
                // SAFETY: the caller's out parameter.
                unsafe { write(out, $value) }
            } )*
        }
    };
}

numbers! {
    nvmlDeviceGetPerformanceState: c_uint = 0;
    nvmlDeviceGetPowerState: c_uint = 0;
    nvmlDeviceGetPowerManagementLimit: c_uint = 700_000;
    nvmlDeviceGetPowerManagementDefaultLimit: c_uint = 700_000;
    nvmlDeviceGetEnforcedPowerLimit: c_uint = 700_000;
    nvmlDeviceGetTotalEnergyConsumption: c_ulonglong = 1_000_000;
    nvmlDeviceGetClockInfo[_clock]: c_uint = 345;
    nvmlDeviceGetMaxClockInfo[_clock]: c_uint = 1980;
    nvmlDeviceGetTemperatureThreshold[_threshold]: c_uint = 87;
    nvmlDeviceGetPcieThroughput[_counter]: c_uint = 0;
    nvmlDeviceGetCurrPcieLinkGeneration: c_uint = 5;
    nvmlDeviceGetMaxPcieLinkGeneration: c_uint = 5;
    nvmlDeviceGetCurrPcieLinkWidth: c_uint = 16;
    nvmlDeviceGetMaxPcieLinkWidth: c_uint = 16;
    nvmlDeviceGetNumGpuCores: c_uint = 16_896;
    nvmlDeviceGetMemoryBusWidth: c_uint = 5120;
    nvmlDeviceGetArchitecture: c_uint = sys::NVML_DEVICE_ARCH_HOPPER;
    nvmlDeviceGetComputeMode: c_uint = 0;
    nvmlDeviceGetDisplayMode: c_uint = 0;
    nvmlDeviceGetDisplayActive: c_uint = 0;
    nvmlDeviceGetMaxMigDeviceCount: c_uint = 7;
    nvmlDeviceIsMigDeviceHandle: c_uint = 0;
    nvmlDeviceGetCurrentClocksThrottleReasons: c_ulonglong = 1;
    nvmlDeviceGetCurrentClocksEventReasons: c_ulonglong = 1;
}

/// Functions that give two numbers of a device.
macro_rules! pairs {
    ($( $name:ident = $first:expr, $second:expr; )*) => {
        functions! {
            $( fn $name(device: Device, first: *mut c_uint, second: *mut c_uint) {
                known(device)?;
                // SAFETY: the caller's out parameters.
                unsafe { write(first, $first) }?;
                // SAFETY: as above.
                unsafe { write(second, $second) }
            } )*
        }
    };
}

pairs! {
    nvmlDeviceGetEncoderUtilization = 0, VIDEO_SAMPLES_US;
    nvmlDeviceGetDecoderUtilization = 0, VIDEO_SAMPLES_US;
    nvmlDeviceGetEccMode = 1, 1;
}

/// Functions of what such a GPU does not have. Their other arguments do not matter.
macro_rules! unsupported {
    ($($name:ident)*) => {
        functions! {
            $( fn $name(device: Device) {
                known(device)?;
                Err(NOT_SUPPORTED)
            } )*
        }
    };
}

unsupported! {
    nvmlDeviceGetFanSpeed
    nvmlDeviceGetFanSpeed_v2
    nvmlDeviceGetDriverModel
    nvmlDeviceGetDriverModel_v2
    nvmlDeviceGetGpuInstanceId
    nvmlDeviceGetComputeInstanceId
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    nvmlDeviceGetConfComputeMemSizeInfo
    nvmlDeviceGetRunningProcessDetailList
}

functions! {
    fn nvmlSystemGetCudaDriverVersion(out: *mut c_int) {
        machine()?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, release()?.cuda_version) }
    }
    fn nvmlDeviceGetSerial(device: Device, out: *mut c_char, len: c_uint) {
        let (_, _, gpu) = known(device)?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, &format!("16501234{:05}", gpu.id)) }
    }
    fn nvmlDeviceGetPciInfo_v3(device: Device, out: *mut sys::nvmlPciInfo_t) {
        let (_, _, gpu) = known(device)?;
        let text = bus_text(&gpu);
        let bytes = |from: usize| text.as_bytes()[from..].iter().map(|byte| byte.cast_signed());
        let (mut long, mut short) = ([0; 32], [0; 16]);
        long.iter_mut().zip(bytes(0)).for_each(|(to, from)| *to = from);
        // The domain has four digits there.
        short.iter_mut().zip(bytes(4)).for_each(|(to, from)| *to = from);
        let info = sys::nvmlPciInfo_t {
            busIdLegacy: short,
            domain: 0,
            bus: c_uint::try_from(bus(gpu.id)).map_err(|_| UNKNOWN)?,
            device: 0,
            pciDeviceId: PCI_DEVICE_ID,
            pciSubSystemId: PCI_SUBSYSTEM_ID,
            busId: long,
        };
        // SAFETY: the caller's out parameter.
        unsafe { write(out, info) }
    }
    fn nvmlDeviceGetBAR1MemoryInfo(device: Device, out: *mut sys::nvmlBAR1Memory_t) {
        known(device)?;
        let free_bytes = BAR1_BYTES - BAR1_USED_BYTES;
        let info = sys::nvmlBAR1Memory_t { bar1Total: BAR1_BYTES, bar1Free: free_bytes, bar1Used: BAR1_USED_BYTES };
        // SAFETY: the caller's out parameter.
        unsafe { write(out, info) }
    }
    fn nvmlDeviceGetTotalEccErrors(device: Device, _kind: c_uint, _counter: c_uint, out: *mut c_ulonglong) {
        known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, 0) }
    }
    fn nvmlDeviceGetMemoryErrorCounter(
        device: Device, _kind: c_uint, _counter: c_uint, _place: c_uint, out: *mut c_ulonglong,
    ) {
        known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, 0) }
    }
    fn nvmlDeviceGetTemperatureV(device: Device, out: *mut sys::nvmlTemperature_t) {
        known(device)?;
        // NVML_STRUCT_VERSION of nvml.h.
        let version = c_uint::try_from(size_of::<sys::nvmlTemperature_t>()).map_err(|_| UNKNOWN)? | 1 << 24;
        if out.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not NULL, and the caller's structure begins with its version and the sensor.
        let given = unsafe { out.read() };
        if given.version != version {
            return Err(WRONG_VERSION);
        }
        // SAFETY: the caller's out parameter.
        unsafe { write(out, sys::nvmlTemperature_t { temperature: 40, ..given }) }
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Device, _index: c_uint, _out: *mut Device) {
        known(device)?;
        Err(NOT_FOUND)
    }
    /// There are no samples of the last second.
    fn nvmlDeviceGetProcessUtilization(
        device: Device, _samples: *mut sys::nvmlProcessUtilizationSample_t, count: *mut c_uint, _since_us: c_ulonglong,
    ) {
        known(device)?;
        // SAFETY: the caller's variable.
        unsafe { write(count, 0) }?;
        Err(NOT_FOUND)
    }
    fn nvmlDeviceGetFieldValues(device: Device, count: c_int, values: *mut sys::nvmlFieldValue_t) {
        known(device)?;
        if values.is_null() {
            return Err(INVALID);
        }
        for at in 0..usize::try_from(count).map_err(|_| INVALID)? {
            // SAFETY: the caller's array has so many.
            let value = unsafe { values.add(at) };
            // SAFETY: as above.
            unsafe { (*value).nvmlReturn = NOT_SUPPORTED };
        }
        Ok(())
    }
    fn nvmlDeviceGetComputeRunningProcesses(
        device: Device, count: *mut c_uint, out: *mut sys::nvmlProcessInfo_v1_t,
    ) {
        let (machine, _, gpu) = known(device)?;
        let old = |one: sys::nvmlProcessInfo_t| sys::nvmlProcessInfo_v1_t { pid: one.pid, usedGpuMemory: one.usedGpuMemory };
        let processes: Vec<_> = processes(&machine, &gpu).into_iter().map(old).collect();
        // SAFETY: the caller's variable and array.
        unsafe { write_list(count, out, &processes) }
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: Device, count: *mut c_uint, out: *mut sys::nvmlProcessInfo_t,
    ) {
        let (machine, _, gpu) = known(device)?;
        // SAFETY: the caller's variable and array.
        unsafe { write_list(count, out, &processes(&machine, &gpu)) }
    }
}

/// Functions that list processes of kinds that there are none of.
macro_rules! no_processes {
    ($($name:ident)*) => {
        functions! {
            $( fn $name(device: Device, count: *mut c_uint, out: *mut sys::nvmlProcessInfo_t) {
                known(device)?;
                // SAFETY: the caller's variable and array.
                unsafe { write_list(count, out, &[]) }
            } )*
        }
    };
}

no_processes! {
    nvmlDeviceGetGraphicsRunningProcesses
    nvmlDeviceGetGraphicsRunningProcesses_v2
    nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetMPSComputeRunningProcesses
    nvmlDeviceGetMPSComputeRunningProcesses_v2
    nvmlDeviceGetMPSComputeRunningProcesses_v3
}
