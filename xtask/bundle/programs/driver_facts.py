"""What the driver and NVML say of themselves: driver_facts.py LIBCUDA WHAT. Prints one line of JSON.

    settings   persistence, MIG and compute mode, which kernel module
    memory     what contexts take of the device's memory
    export     whether an imported handle can be exported again
    hog        takes all free memory, prints how much, and holds it until its input ends
"""

import ctypes
import json
import os
import subprocess
import sys

MEBI = 1 << 20
PINNED, READ_WRITE, DESCRIPTOR = 1, 3, 1
WORD = 0x5A17


class Prop(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


class NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


DEVICE = (1, 0)  # CU_MEM_LOCATION_TYPE_DEVICE, the first one
by = ctypes.byref
size = ctypes.c_size_t
handle = ctypes.c_ulonglong


class Driver:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)

    def code(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code:
            sys.exit(f"{name}: {code}")

    def start(self):
        """The primary context of the first device."""
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", by(context), 0)
        self.call("cuCtxSetCurrent", context)

    def free_bytes(self):
        free, total = size(), size()
        self.call("cuMemGetInfo_v2", by(free), by(total))
        return free.value


class Nvml:
    """The first device by NVML; without it, everything is None."""

    def __init__(self):
        self.device = ctypes.c_void_p()
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.library = None
            return
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(0, by(self.device)):
            self.library = None

    def number(self, name, *more):
        found = ctypes.c_uint()
        function = getattr(self.library, name, None) if self.library else None
        return found.value if function and function(self.device, by(found), *more) == 0 else None

    def used_bytes(self):
        memory = NvmlMemory()
        if not self.library or self.library.nvmlDeviceGetMemoryInfo(self.device, by(memory)):
            return None
        return memory.used


def read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def settings(_):
    nvml = Nvml()
    version = read("/proc/driver/nvidia/version")
    kind = None if version is None else "open" if "Open Kernel Module" in version else "closed"
    return {
        "has_persistence_mode": nvml.number("nvmlDeviceGetPersistenceMode"),
        "has_mig": nvml.number("nvmlDeviceGetMigMode", by(ctypes.c_uint())),
        "compute_mode": nvml.number("nvmlDeviceGetComputeMode"),
        "kernel_module": kind,
        "kernel_module_version": read("/sys/module/nvidia/version"),
        "has_mps": os.path.exists("/tmp/nvidia-mps") or "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
        "devices": sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")),
    }


def memory(driver):
    """Bytes that each step takes: by NVML, which counts all processes, and by the context's own count."""
    nvml = Nvml()
    used = {"before": nvml.used_bytes()}
    driver.call("cuInit", 0)
    used["after cuInit"] = nvml.used_bytes()
    context, second = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", by(context), 0)
    driver.call("cuCtxSetCurrent", context)
    used["with a primary context"] = nvml.used_bytes()
    free_bytes = driver.free_bytes()
    driver.call("cuCtxCreate_v2", by(second), 0, 0)
    used["with a second context"] = nvml.used_bytes()
    second_bytes = free_bytes - driver.free_bytes()
    driver.call("cuCtxDestroy_v2", second)
    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    used["after both"] = nvml.used_bytes()
    steps = list(used.values())
    known = None not in steps
    return {
        "init_bytes": steps[1] - steps[0] if known else None,
        "context_bytes": steps[2] - steps[1] if known else None,
        "second_context_bytes": second_bytes,
        "kept_bytes": steps[4] - steps[0] if known else None,
        "used_bytes": used,
    }


def mapped(driver, imported, unit):
    """Where a handle is mapped, with access."""
    address, access = handle(), Access(*DEVICE, READ_WRITE)
    driver.call("cuMemAddressReserve", by(address), size(unit), size(0), handle(0), handle(0))
    driver.call("cuMemMap", address, size(unit), size(0), imported, handle(0))
    driver.call("cuMemSetAccess", address, size(unit), by(access), size(1))
    return address


def export(driver):
    """Memory is handed on twice; what the last process reads is what the first has written."""
    driver.start()
    prop, unit, created = Prop(PINNED, DESCRIPTOR, *DEVICE), size(), handle()
    driver.call("cuMemGetAllocationGranularity", by(unit), by(prop), 0)
    driver.call("cuMemCreate", by(created), unit, by(prop), handle(0))
    address = mapped(driver, created, unit.value)
    driver.call("cuMemsetD32_v2", address, ctypes.c_uint(WORD), size(unit.value // 4))
    driver.call("cuCtxSynchronize")
    return {**handed_on(driver, created, unit.value, 2), "unit_bytes": unit.value}


def handed_on(driver, memory, unit, times):
    """What the processes below say of memory that this one exports."""
    descriptor = ctypes.c_int(-1)
    code = driver.code("cuMemExportToShareableHandle", by(descriptor), memory, DESCRIPTOR, handle(0))
    if code:
        return {"exported_again": False, "export_error": code}
    words = [sys.executable, __file__, sys.argv[1], "import", str(descriptor.value), str(unit), str(times - 1)]
    said = subprocess.run(words, pass_fds=[descriptor.value], capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"after {times - 1} more: {said.stderr.strip()}")
    return json.loads(said.stdout)


def taken_over(driver):
    descriptor, unit, times = (int(word) for word in sys.argv[3:6])
    driver.start()
    imported, word = handle(), ctypes.c_uint()
    driver.call("cuMemImportFromShareableHandle", by(imported), ctypes.c_void_p(descriptor), DESCRIPTOR)
    if times:
        return handed_on(driver, imported, unit, times)
    driver.call("cuMemcpyDtoH_v2", by(word), mapped(driver, imported, unit), size(4))
    return {"exported_again": True, "is_content_right": word.value == WORD}


def hog(driver):
    driver.start()
    taken, piece = 0, 256 * MEBI
    while piece >= MEBI:
        if driver.code("cuMemAlloc_v2", by(handle()), size(piece)):
            piece //= 2
        else:
            taken += piece
    print(json.dumps({"taken_bytes": taken}), flush=True)
    sys.stdin.read()
    return {}


WHAT = {"settings": settings, "memory": memory, "export": export, "import": taken_over, "hog": hog}
print(json.dumps(WHAT[sys.argv[2]](Driver(sys.argv[1]))))
