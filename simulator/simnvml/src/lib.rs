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
use simcuda_machine::config::{Config, driver_version};
use simcuda_machine::{
    Counters, DEVICE_NAME, DumpBlockers, LEDGER, bus, device_directory, device_file, uuid,
};

type Code = sys::nvmlReturn_t;
type Device = sys::nvmlDevice_t;

const OK: Code = sys::nvmlReturn_enum_NVML_SUCCESS;
const UNINITIALIZED: Code = sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
const INVALID: Code = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const TOO_SMALL: Code = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const NOT_FOUND: Code = sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const NOT_SUPPORTED: Code = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const UNKNOWN: Code = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;

/// The handle of device 0.
const FIRST_HANDLE: usize = 0x1000;

/// The version that goes with CUDA 13.0.
const DRIVER: &str = "580.95.05";
const NVML: &str = "13.580.95.05";

/// How often NVML was initialised, and what the process holds meanwhile.
static STATE: Mutex<State> = Mutex::new(State { initialised: 0, config: None, held: None });

struct State {
    initialised: u32,
    config: Option<Config>,
    held: Option<Held>,
}

/// Released when dropped.
struct Held {
    _devices: Vec<File>,
    _blockers: DumpBlockers,
}

impl Held {
    fn acquire(config: &Config) -> io::Result<Self> {
        std::fs::create_dir_all(&config.directory)?;
        let open = |ordinal| device_file::open(&config.directory, ordinal);
        Ok(Self {
            _devices: (0..config.devices).map(open).collect::<io::Result<_>>()?,
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
        let config = Config::from_environment().or_else(complain)?;
        state.held = Some(Held::acquire(&config).or_else(complain)?);
        state.config = Some(config);
    }
    state.initialised += 1;
    Ok(())
}

/// The machine, while NVML is initialised.
fn machine() -> Result<Config, Code> {
    STATE.lock().config.clone().ok_or(UNINITIALIZED)
}

/// The ordinal of a device, and the machine.
fn known(device: Device) -> Result<(Config, usize), Code> {
    let machine = machine()?;
    let ordinal = device.addr().checked_sub(FIRST_HANDLE).filter(|ordinal| *ordinal < machine.devices);
    Ok((machine, ordinal.ok_or(INVALID)?))
}

fn handle(machine: &Config, ordinal: usize) -> Result<Device, Code> {
    if ordinal < machine.devices { Ok(without_provenance_mut(FIRST_HANDLE + ordinal)) } else { Err(INVALID) }
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

fn uuid_text(machine: &Config, ordinal: usize) -> String {
    let hex: String = uuid(&machine.directory, ordinal).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn bus_text(ordinal: usize) -> String {
    format!("00000000:{:02X}:00.0", bus(i32::try_from(ordinal).unwrap_or(0)))
}

/// Total and used memory of a device, bytes.
fn memory(machine: &Config, ordinal: usize) -> (u64, u64) {
    let ledger = File::open(device_directory(&machine.directory, ordinal).join(LEDGER));
    let counters = ledger.and_then(|file| Counters::read(&file)).unwrap_or_default();
    (machine.memory_bytes, counters.used_bytes.min(machine.memory_bytes))
}

/// The functions: each returns a `nvmlReturn_t`.
macro_rules! functions {
    ($( fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $body:block )*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> Code {
                let body = || -> Result<(), Code> { $body };
                body().err().unwrap_or(OK)
            }
        )*
    };
}

functions! {
    fn nvmlInit() { initialise() }
    fn nvmlInit_v2() { initialise() }
    fn nvmlInitWithFlags(_flags: c_uint) { initialise() }
    fn nvmlShutdown() {
        let mut state = STATE.lock();
        state.initialised = state.initialised.checked_sub(1).ok_or(UNINITIALIZED)?;
        if state.initialised == 0 {
            (state.config, state.held) = (None, None);
        }
        Ok(())
    }
    fn nvmlSystemGetDriverVersion(out: *mut c_char, len: c_uint) {
        machine()?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, DRIVER) }
    }
    fn nvmlSystemGetNVMLVersion(out: *mut c_char, len: c_uint) {
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, NVML) }
    }
    fn nvmlSystemGetCudaDriverVersion_v2(out: *mut c_int) {
        machine()?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, driver_version().map_err(|_| UNKNOWN)?) }
    }
    fn nvmlDeviceGetCount_v2(out: *mut c_uint) {
        let count = c_uint::try_from(machine()?.devices).map_err(|_| UNKNOWN)?;
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
        let found = (0..machine.devices).find(|ordinal| uuid_text(&machine, *ordinal) == text);
        // SAFETY: the caller's out parameter.
        unsafe { write(out, handle(&machine, found.ok_or(NOT_FOUND)?)?) }
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(text: *const c_char, out: *mut Device) {
        let machine = machine()?;
        // SAFETY: the caller's text.
        let text = unsafe { read_text(text) }?;
        let found = (0..machine.devices).find(|ordinal| bus_text(*ordinal).eq_ignore_ascii_case(text));
        // SAFETY: the caller's out parameter.
        unsafe { write(out, handle(&machine, found.ok_or(NOT_FOUND)?)?) }
    }
    fn nvmlDeviceGetIndex(device: Device, out: *mut c_uint) {
        let (_, ordinal) = known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, c_uint::try_from(ordinal).map_err(|_| UNKNOWN)?) }
    }
    fn nvmlDeviceGetMinorNumber(device: Device, out: *mut c_uint) {
        // SAFETY: the caller's out parameter.
        let code = unsafe { nvmlDeviceGetIndex(device, out) };
        if code == OK { Ok(()) } else { Err(code) }
    }
    fn nvmlDeviceGetName(device: Device, out: *mut c_char, len: c_uint) {
        known(device)?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, DEVICE_NAME) }
    }
    fn nvmlDeviceGetUUID(device: Device, out: *mut c_char, len: c_uint) {
        let (machine, ordinal) = known(device)?;
        // SAFETY: the caller's buffer of this length.
        unsafe { write_text(out, len, &uuid_text(&machine, ordinal)) }
    }
    fn nvmlDeviceGetMemoryInfo(device: Device, out: *mut sys::nvmlMemory_t) {
        let (machine, ordinal) = known(device)?;
        let (total, used) = memory(&machine, ordinal);
        // SAFETY: the caller's out parameter.
        unsafe { write(out, sys::nvmlMemory_t { total, free: total - used, used }) }
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
        let (machine, _) = known(device)?;
        // SAFETY: the caller's out parameter.
        unsafe { write(out, c_uint::from(machine.is_persistent)) }
    }
    fn nvmlDeviceGetMigMode(device: Device, _current: *mut c_uint, _pending: *mut c_uint) {
        known(device)?;
        Err(NOT_SUPPORTED)
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
    if let Some(config) = &state.config {
        match Held::acquire(config) {
            Ok(held) => state.held = Some(held),
            Err(error) => eprintln!("simnvml: {error}"),
        }
    }
}
