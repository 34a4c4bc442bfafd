//! A simulated `libnvidia-ml.so.1` (NVML): what GPU monitors call, on the devices of simcuda.
//!
//! From the first `nvmlInit` to the last `nvmlShutdown` the process has the devices open, and CRIU refuses it, as with
//! NVIDIA's. The simulated driver's checkpoint takes that away and its restore brings it back (`simnvml_let_go`,
//! `simnvml_take_hold`): so does NVIDIA's from 570 on.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs::File;
use std::io;
use std::ptr::without_provenance_mut;

use nvml_wrapper_sys::bindings as sys;
use parking_lot::Mutex;
use simcuda_machine::config::Config;
use simcuda_machine::{DumpBlockers, Gpu, Ledger, Release, bus, device_file};

/// The functions: each returns a `nvmlReturn_t`.
macro_rules! functions {
    ($( $(#[$doc:meta])* fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $body:block )*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> Code {
                let body = || -> Result<(), Code> {
                    crate::faults::before(stringify!($name))?;
                    $body
                };
                body().err().unwrap_or(OK)
            }
        )*
    };
}

mod faults;
mod monitors;

type Code = sys::nvmlReturn_t;
type Device = sys::nvmlDevice_t;

const OK: Code = sys::nvmlReturn_enum_NVML_SUCCESS;
const UNINITIALIZED: Code = sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
const INVALID: Code = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const TOO_SMALL: Code = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const NOT_FOUND: Code = sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const NOT_SUPPORTED: Code = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const WRONG_VERSION: Code = sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
const UNKNOWN: Code = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;

/// The handle of device 0.
const FIRST_HANDLE: usize = 0x1000;

/// How often NVML was initialised, and what the process holds meanwhile.
static STATE: Mutex<State> = Mutex::new(State { initialised: 0, machine: None, held: None });

struct State {
    initialised: u32,
    machine: Option<Machine>,
    held: Option<Held>,
}

/// The machine as it was when NVML was initialised. `CUDA_VISIBLE_DEVICES` hides nothing from NVML.
#[derive(Clone)]
struct Machine {
    config: Config,
    gpus: Vec<Gpu>,
}

impl Machine {
    fn look() -> Result<Self, String> {
        let config = Config::from_environment()?;
        Ok(Self { gpus: config.gpus()?, config })
    }
}

/// Released when dropped.
struct Held {
    _devices: Vec<File>,
    _blockers: DumpBlockers,
}

impl Held {
    fn acquire(machine: &Machine) -> io::Result<Self> {
        let directory = &machine.config.directory;
        std::fs::create_dir_all(directory)?;
        let open = |gpu: &Gpu| device_file::open(directory, gpu.id);
        Ok(Self {
            _devices: machine.gpus.iter().map(open).collect::<io::Result<_>>()?,
            _blockers: DumpBlockers::acquire()?,
        })
    }
}

fn complain<T>(error: impl std::fmt::Display) -> Result<T, Code> {
    eprintln!("simnvml: {error}");
    Err(UNKNOWN)
}

fn initialise() -> Result<(), Code> {
    let mut state = STATE.lock();
    if state.initialised == 0 {
        let machine = Machine::look().or_else(complain)?;
        state.held = Some(Held::acquire(&machine).or_else(complain)?);
        state.machine = Some(machine);
    }
    state.initialised += 1;
    Ok(())
}

/// The machine, while NVML is initialised and has the devices open. Between the driver's checkpoint and its restore the
/// library has lost its descriptors without noticing, so that a call fails in the kernel.
fn machine() -> Result<Machine, Code> {
    let state = STATE.lock();
    let machine = state.machine.clone().ok_or(UNINITIALIZED)?;
    if state.held.is_some() { Ok(machine) } else { Err(UNKNOWN) }
}

/// The place of a device, the device, and the machine.
fn known(device: Device) -> Result<(Machine, usize, Gpu), Code> {
    let machine = machine()?;
    let place = device.addr().checked_sub(FIRST_HANDLE).ok_or(INVALID)?;
    let gpu = machine.gpus.get(place).cloned().ok_or(INVALID)?;
    Ok((machine, place, gpu))
}

fn handle(machine: &Machine, place: usize) -> Result<Device, Code> {
    if place < machine.gpus.len() { Ok(without_provenance_mut(FIRST_HANDLE + place)) } else { Err(INVALID) }
}

fn release() -> Result<&'static Release, Code> {
    Release::from_environment().or_else(complain)
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn write<T>(out: *mut T, value: T) -> Result<(), Code> {
    if out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
/// `out` is NULL or valid for writes of `len` bytes.
unsafe fn write_text(out: *mut c_char, len: c_uint, text: &str) -> Result<(), Code> {
    if out.is_null() {
        return Err(INVALID);
    }
    if text.len() >= len as usize {
        return Err(TOO_SMALL);
    }
    // SAFETY: the buffer has room for the text and its NUL.
    unsafe { out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
    // SAFETY: as above.
    let end = unsafe { out.add(text.len()) };
    // SAFETY: as above.
    unsafe { end.write(0) };
    Ok(())
}

/// # Safety
/// `text` is NULL or a NUL-terminated string.
unsafe fn read_text<'a>(text: *const c_char) -> Result<&'a str, Code> {
    if text.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| INVALID)
}

/// # Safety
/// `count` is NULL or valid for reads and writes; `out` is NULL or has room for so many.
unsafe fn write_list<T: Copy>(count: *mut c_uint, out: *mut T, list: &[T]) -> Result<(), Code> {
    if count.is_null() {
        return Err(INVALID);
    }
    let needed = c_uint::try_from(list.len()).map_err(|_| UNKNOWN)?;
    // SAFETY: not NULL, so that it is the caller's variable.
    let room = unsafe { count.replace(needed) };
    if room < needed {
        return Err(TOO_SMALL);
    }
    if needed > 0 && out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller's array has room for as many.
    unsafe { out.copy_from_nonoverlapping(list.as_ptr(), list.len()) };
    Ok(())
}

fn bus_text(gpu: &Gpu) -> String {
    format!("00000000:{:02X}:00.0", bus(gpu.id))
}

/// Total and used memory of a device, bytes.
fn memory(machine: &Machine, gpu: &Gpu) -> Result<(u64, u64), Code> {
    let used_bytes = Ledger::of(&machine.config.directory, gpu.id).used_bytes().or_else(complain)?;
    Ok((gpu.memory_bytes, used_bytes.min(gpu.memory_bytes)))
}

/// The processes with memory of a device.
fn processes(machine: &Machine, gpu: &Gpu) -> Vec<sys::nvmlProcessInfo_t> {
    let ledger = Ledger::of(&machine.config.directory, gpu.id);
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let of = |pid| sys::nvmlProcessInfo_t {
        pid,
        usedGpuMemory: ledger.mapped_bytes(pid),
        gpuInstanceId: c_uint::MAX,
        computeInstanceId: c_uint::MAX,
    };
    pids.map(of).filter(|process| process.usedGpuMemory > 0).collect()
}

functions! {
    fn nvmlInit() { initialise() }
    fn nvmlInit_v2() { initialise() }
    fn nvmlInitWithFlags(_flags: c_uint) { initialise() }
    fn nvmlShutdown() {
        let mut state = STATE.lock();
        state.initialised = state.initialised.checked_sub(1).ok_or(UNINITIALIZED)?;
        if state.initialised == 0 {
            (state.machine, state.held) = (None, None);
        }
        Ok(())
    }
    fn nvmlSystemGetDriverVersion(out: *mut c_char, len: c_uint) {
        machine()?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, release()?.version) }
    }
    fn nvmlSystemGetNVMLVersion(out: *mut c_char, len: c_uint) {
        let release = release()?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, &format!("{}.{}", release.cuda_version / 1000, release.version)) }
    }
    fn nvmlSystemGetCudaDriverVersion_v2(out: *mut c_int) {
        machine()?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, release()?.cuda_version) }
    }
    fn nvmlDeviceGetCount_v2(out: *mut c_uint) {
        let count = c_uint::try_from(machine()?.gpus.len()).map_err(|_| UNKNOWN)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, count) }
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut Device) {
        let device = handle(&machine()?, index as usize)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, device) }
    }
    fn nvmlDeviceGetHandleByUUID(text: *const c_char, out: *mut Device) {
        let machine = machine()?;
        // SAFETY: the caller's text.
        let text = unsafe { read_text(text) }?;
        let found = machine.gpus.iter().position(|gpu| gpu.uuid_text() == text);
        // SAFETY: the caller's out parameter.
        unsafe { write(out, handle(&machine, found.ok_or(NOT_FOUND)?)?) }
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(text: *const c_char, out: *mut Device) {
        let machine = machine()?;
        // SAFETY: the caller's text.
        let text = unsafe { read_text(text) }?;
        let found = machine.gpus.iter().position(|gpu| bus_text(gpu).eq_ignore_ascii_case(text));
        // SAFETY: the caller's out parameter.
        unsafe { write(out, handle(&machine, found.ok_or(NOT_FOUND)?)?) }
    }
    fn nvmlDeviceGetIndex(device: Device, out: *mut c_uint) {
        let (_, place, _) = known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, c_uint::try_from(place).map_err(|_| UNKNOWN)?) }
    }
    fn nvmlDeviceGetMinorNumber(device: Device, out: *mut c_uint) {
        let (_, _, gpu) = known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, c_uint::try_from(gpu.id).map_err(|_| UNKNOWN)?) }
    }
    fn nvmlDeviceGetName(device: Device, out: *mut c_char, len: c_uint) {
        let (_, _, gpu) = known(device)?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, &gpu.name) }
    }
    fn nvmlDeviceGetUUID(device: Device, out: *mut c_char, len: c_uint) {
        let (_, _, gpu) = known(device)?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, &gpu.uuid_text()) }
    }
    fn nvmlDeviceGetMemoryInfo(device: Device, out: *mut sys::nvmlMemory_t) {
        let (machine, _, gpu) = known(device)?;
        let (total, used) = memory(&machine, &gpu)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, sys::nvmlMemory_t { total, free: total - used, used }) }
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, out: *mut sys::nvmlMemory_v2_t) {
        let (machine, _, gpu) = known(device)?;
        let (total, used) = memory(&machine, &gpu)?;
        // NVML_STRUCT_VERSION of nvml.h.
        let version = c_uint::try_from(size_of::<sys::nvmlMemory_v2_t>()).map_err(|_| UNKNOWN)? | 2 << 24;
        if out.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not NULL, and the caller's structure begins with its version.
        if unsafe { (*out).version } != version {
            return Err(WRONG_VERSION);
        }
        // SAFETY: the caller's out parameter.
        unsafe { write(out, sys::nvmlMemory_v2_t { version, total, reserved: 0, free: total - used, used }) }
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: Device, count: *mut c_uint, out: *mut sys::nvmlProcessInfo_t,
    ) {
        let (machine, _, gpu) = known(device)?;
        // SAFETY: the caller's variable and array.
        unsafe { write_list(count, out, &processes(&machine, &gpu)) }
    }
    fn nvmlDeviceGetUtilizationRates(device: Device, out: *mut sys::nvmlUtilization_t) {
        known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, sys::nvmlUtilization_t { gpu: 0, memory: 0 }) }
    }
    fn nvmlDeviceGetTemperature(device: Device, _sensor: c_uint, out: *mut c_uint) {
        known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, 40) }
    }
    fn nvmlDeviceGetPowerUsage(device: Device, out: *mut c_uint) {
        known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, 70_000) }
    }
    fn nvmlDeviceGetPersistenceMode(device: Device, out: *mut c_uint) {
        let (machine, _, _) = known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, c_uint::from(machine.config.is_persistent)) }
    }
    fn nvmlDeviceGetMigMode(device: Device, current: *mut c_uint, pending: *mut c_uint) {
        let (machine, _, _) = known(device)?;
        if !machine.config.is_mig {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller's out parameters.
        unsafe { write(current, 1) }?;
        // SAFETY: as above.
        unsafe { write(pending, 1) }
    }
    fn nvmlDeviceGetCudaComputeCapability(device: Device, major: *mut c_int, minor: *mut c_int) {
        known(device)?;
        // SAFETY: the caller's out parameters.
        unsafe { write(major, 9) }?;
        // SAFETY: as above.
        unsafe { write(minor, 0) }
    }
}

/// nvmlErrorString: a static text.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: Code) -> *const c_char {
    let text = match code {
        OK => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID => c"Invalid Argument",
        NOT_FOUND => c"Not Found",
        NOT_SUPPORTED => c"Not Supported",
        TOO_SMALL => c"Insufficient Size",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// For the simulated driver's checkpoint: closes the devices.
#[unsafe(no_mangle)]
extern "C" fn simnvml_let_go() {
    STATE.lock().held = None;
}

/// For the simulated driver's restore: opens the devices again, if NVML is initialised.
#[unsafe(no_mangle)]
extern "C" fn simnvml_take_hold() {
    let mut state = STATE.lock();
    if let Some(machine) = &state.machine {
        match Held::acquire(machine) {
            Ok(held) => state.held = Some(held),
            Err(error) => eprintln!("simnvml: {error}"),
        }
    }
}
