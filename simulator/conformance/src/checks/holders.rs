//! What a GPU keeps when its processes end, and what the checkpoint API does to a process and to the machine around it.
//!
//! Some of these checks ruin what they use, on a real machine perhaps the machine itself. They run where
//! `CONFORMANCE_RUINS` is `1`; those of a mode of the machine run in that mode only.

use std::ffi::{CStr, c_uint, c_void};
use std::os::fd::OwnedFd;

use libloading::os::unix::Library;
use rustix::mm::{MapFlags, ProtFlags};

use crate::check::{Check, Result, Stop, check, expect_equal, failed, skipped};
use crate::ckpt::{checkpoint, cycle, lock, me, restore, unlock};
use crate::helper::Helper;
use crate::{ensure, gives, gpu, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "device/torn-down",
        "without persistence mode, memory that only a descriptor holds is gone once no process has the GPU open (source: open-gpu-kernel-modules, nv.c and rmobjexportimport.c; cuda-checkpoint issue 25)",
        torn_down,
    ),
    check(
        "device/persistence",
        "in persistence mode it is there for the next process (source: cuda-checkpoint issue 25)",
        persistence,
    ),
    check(
        "checkpoint/no-room",
        "a restore without enough device memory fails, and the process is of no use for good, also once there is memory (source: cuda-checkpoint issue 44)",
        no_room,
    ),
    check(
        "checkpoint/kill-checkpointed",
        "a process that was restored, and then locked and checkpointed, can be killed (source: cuda-checkpoint issue 53)",
        kill_checkpointed,
    ),
    check(
        "checkpoint/kill-ruins",
        "killing a process that was restored ruins the GPU for all others (source: cuda-checkpoint issue 53)",
        kill_ruins,
    ),
    check(
        "checkpoint/ranges-are-free",
        "while a process is checkpointed its address ranges are not mapped, and a restore takes the place of what is mapped there since (source: gvisor issue 14776), or they are held by placeholders (580.159.04)",
        ranges_are_free,
    ),
    check(
        "checkpoint/nvml",
        "a checkpointed process has no file of a device open, those of NVML included, which works again afterwards (source: cuda-checkpoint issue 15 and table of releases)",
        nvml,
    ),
];

const MEMORY_BYTES: u64 = 2 << 20;

/// NVML, initialised; `nvml.h` has the types.
struct Nvml(Library);

impl Nvml {
    fn start() -> Result<Self> {
        // SAFETY: the constructors of NVML may run.
        let Ok(library) = (unsafe { Library::new("libnvidia-ml.so.1") }) else {
            return skipped("there is no NVML");
        };
        let nvml = Self(library);
        nvml.call(c"nvmlInit_v2")?;
        Ok(nvml)
    }

    fn function<T: Copy>(&self, name: &CStr) -> Result<T> {
        // SAFETY: callers name a function together with its type.
        let found = unsafe { self.0.get::<T>(name) };
        found.map(|function| *function).or_else(|error| failed(format!("NVML: {error}")))
    }

    fn call(&self, name: &CStr) -> Result {
        let function: extern "C" fn() -> c_uint = self.function(name)?;
        expect_equal(&name.to_string_lossy(), function(), 0)
    }

    fn count(&self) -> Result<c_uint> {
        let mut count = 0;
        let get: extern "C" fn(*mut c_uint) -> c_uint = self.function(c"nvmlDeviceGetCount_v2")?;
        expect_equal("nvmlDeviceGetCount", get(&raw mut count), 0)?;
        Ok(count)
    }

    fn is_persistent(&self) -> Result<bool> {
        let (mut device, mut mode): (*mut c_void, c_uint) = (std::ptr::null_mut(), 0);
        let find: extern "C" fn(c_uint, *mut *mut c_void) -> c_uint =
            self.function(c"nvmlDeviceGetHandleByIndex_v2")?;
        let get: extern "C" fn(*mut c_void, *mut c_uint) -> c_uint =
            self.function(c"nvmlDeviceGetPersistenceMode")?;
        expect_equal("nvmlDeviceGetHandleByIndex", find(0, &raw mut device), 0)?;
        expect_equal("nvmlDeviceGetPersistenceMode", get(device, &raw mut mode), 0)?;
        Ok(mode == 1)
    }
}

/// Whether persistence mode is on. NVML does not hold the GPU open afterwards.
fn is_persistent() -> Result<bool> {
    let nvml = Nvml::start()?;
    let mode = nvml.is_persistent()?;
    nvml.call(c"nvmlShutdown")?;
    Ok(mode)
}

/// Exports memory of a process, which is killed, and imports it in a new one: its first word there.
fn word_of_a_killed_exporter() -> Result<u64> {
    let mut exporter = Helper::start()?;
    let address = exporter.number(&format!("create {MEMORY_BYTES}"))?;
    exporter.ask(&format!("fill {address} 4711 {}", MEMORY_BYTES / 4))?;
    exporter.ask("export")?;
    let descriptor: OwnedFd = exporter.receive()?;
    exporter.kill()?;
    let mut importer = Helper::start()?;
    importer.send(&descriptor)?;
    let address = importer.number(&format!("import {MEMORY_BYTES}"))?;
    importer.number(&format!("read {address}"))
}

fn torn_down() -> Result {
    if is_persistent()? {
        return skipped("persistence mode is on");
    }
    match word_of_a_killed_exporter() {
        Err(Stop::Failed(error)) if error.contains("cuMemImportFromShareableHandle") => Ok(()),
        Ok(4711) => skipped("the memory is there: another process may have the GPU open"),
        Ok(other) => failed(format!("the memory has {other}")),
        Err(stop) => Err(stop),
    }
}

fn persistence() -> Result {
    if !is_persistent()? {
        return skipped("persistence mode is off");
    }
    expect_equal("the memory's first word", word_of_a_killed_exporter()?, 4711)
}

/// Skips a check that ruins what it uses, unless it is asked for.
fn may_ruin() -> Result {
    gpu::needs_driver(12080)?;
    match std::env::var("CONFORMANCE_RUINS") {
        Ok(value) if value == "1" => Ok(()),
        _ => skipped("CONFORMANCE_RUINS is not 1: this may take the machine down"),
    }
}

fn no_room() -> Result {
    may_ruin()?;
    gpu::start()?;
    gpu::alloc(64 << 20)?;
    let mut other = Helper::start()?;
    lock(me())?;
    checkpoint(me())?;
    other.ask("take-all")?;
    refuses!(cuCheckpointProcessRestore(me(), std::ptr::null_mut()));
    other.kill()?;
    // The memory is free again.
    let mut third = Helper::start()?;
    third.number(&format!("alloc {}", 64 << 20))?;
    third.kill()?;
    gives!(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessRestore(me(), std::ptr::null_mut()));
    let mut address = 0;
    refuses!(cuMemAlloc_v2(&raw mut address, 4096));
    Ok(())
}

/// A process with memory that was taken off the device and is back.
fn restored() -> Result<Helper> {
    let mut helper = Helper::start()?;
    helper.number(&format!("alloc {MEMORY_BYTES}"))?;
    cycle(helper.pid())?;
    Ok(helper)
}

fn kill_checkpointed() -> Result {
    may_ruin()?;
    let mut helper = restored()?;
    lock(helper.pid())?;
    checkpoint(helper.pid())?;
    helper.kill()?;
    Helper::start()?.number(&format!("alloc {MEMORY_BYTES}")).map(|_| ())
}

fn kill_ruins() -> Result {
    may_ruin()?;
    restored()?.kill()?;
    match Helper::start() {
        Err(Stop::Failed(_)) => Ok(()),
        Ok(_) => skipped("the GPU works: this machine is not one of those"),
        Err(stop) => Err(stop),
    }
}

/// Whether something is mapped at an address, with its access rights.
fn rights_at(address: u64) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = u64::from_str_radix(end, 16).ok()?;
        (start..end).contains(&address).then(|| rest.chars().take(4).collect())
    })
}

fn ranges_are_free() -> Result {
    gpu::needs_driver(12080)?;
    gpu::start()?;
    const PAGE_BYTES: usize = 4096;
    let address = gpu::alloc(MEMORY_BYTES as usize)?;
    gpu::write(address, &[8_u32; 4096])?;
    ensure!(rights_at(address).is_some(), "device memory has no addresses of this process");
    lock(me())?;
    checkpoint(me())?;
    let rights = rights_at(address);
    ensure!(rights.as_deref().is_none_or(|rights| rights == "---p"), "the memory is mapped: {rights:?}");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: it is mapped where nothing is, and the mapping is not used.
    let mapped = unsafe { rustix::mm::mmap_anonymous(address as *mut c_void, PAGE_BYTES, access, flags) };
    expect_equal("whether the address can be mapped", mapped.is_ok(), rights.is_none())?;
    restore(me())?;
    unlock(me())?;
    ensure!(rights_at(address).as_deref() != Some("rw-p"), "the program's own mapping is still there");
    gpu::expect_content(address, &[8_u32; 4096])
}

/// How many descriptors of this process lead to a file of a device.
fn device_files() -> usize {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return 0 };
    let targets = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let names = targets.filter_map(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    names.filter(|name| name.starts_with("nvidia")).count()
}

fn nvml() -> Result {
    gpu::needs_driver(12080)?;
    gpu::start()?;
    let of_the_driver = device_files();
    ensure!(of_the_driver > 0, "the driver has no file of a device open");
    let nvml = Nvml::start()?;
    let all = device_files();
    ensure!(all > of_the_driver, "NVML has no file of a device open");
    let count = nvml.count()?;
    lock(me())?;
    checkpoint(me())?;
    expect_equal("files of devices while checkpointed", device_files(), 0)?;
    restore(me())?;
    unlock(me())?;
    ensure!(device_files() > 0, "the driver has no file of a device open after the restore");
    expect_equal("devices of NVML", nvml.count()?, count)
}
