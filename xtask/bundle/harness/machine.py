"""What this machine has, looked at once before the first stage."""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys

from harness import processes

DRIVER = "libcuda.so.1"
# What torch says of itself, in a process of its own: it is large, and may hang on a broken driver.
ASK_TORCH = """
import json, sys, torch
said = {"version": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
said["is_on_gpu"] = torch.cuda.is_available()
if said["is_on_gpu"]:
    said["device"] = torch.cuda.get_device_name(0)
    said["nccl"] = list(torch.cuda.nccl.version())
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "/libnccl.so" in line}
    said["nccl_path"] = paths.pop() if paths else None
print("torch " + json.dumps(said))
"""
ASK_DRIVER = """
import ctypes, json, sys
driver = ctypes.CDLL(sys.argv[1])
version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
free, total, context = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
def call(name, *arguments):
    code = getattr(driver, name)(*arguments)
    if code: sys.exit(f"{name}: {code}")
call("cuDriverGetVersion", ctypes.byref(version))
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
call("cuDeviceGetName", name, 128, 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
MULTICAST_SUPPORTED, has_it, with_multicast = 132, ctypes.c_int(), 0
for device in range(count.value):
    # An older driver does not know it.
    code = driver.cuDeviceGetAttribute(ctypes.byref(has_it), MULTICAST_SUPPORTED, device)
    with_multicast += code == 0 and has_it.value
print("driver " + json.dumps({"api": version.value, "devices": count.value, "device": name.value.decode(),
    "with_multicast": with_multicast,
    "free_bytes": free.value, "total_bytes": total.value,
    "has_checkpoint": hasattr(driver, "cuCheckpointProcessLock")}))
"""


def look(settings):
    """All of it, as a dictionary that goes into the results."""
    facts = {
        "kernel": platform.release(),
        "os": os_name(),
        "glibc": platform.libc_ver()[1],
        "cpu": cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory("MemTotal"),
        "available_bytes": memory("MemAvailable"),
        "disk_free_bytes": shutil.disk_usage(settings.work).free,
        "bundle": bundle(settings),
    }
    facts["nvidia_smi"] = nvidia_smi()
    facts["libcuda"] = settings.libcuda or find_driver()
    facts.update(ask_driver(settings, facts["libcuda"]))
    facts.update(ask_torch(settings))
    facts["criu"] = try_criu(settings)
    facts["doctor"] = attempt([settings.ckpt_run, "doctor", "--criu", settings.criu], settings)[1]
    return facts


def attempt(argv, settings, limit_s=60):
    try:
        return processes.run(argv, limit_s, env=settings.env())
    except (OSError, processes.Fail) as error:
        return 1, str(error)


def try_criu(settings):
    """Whether CRIU saves and restores a small process. `criu check` alone is not asked: it also fails for want of what
    is not needed."""
    version = first(attempt([settings.criu, "--version"], settings)[1])
    found = {"version": version, "check": processes.tail(attempt([settings.criu, "check"], settings)[1])}
    images = os.path.join(settings.work, "criu-try")
    os.makedirs(images)
    nothing = subprocess.DEVNULL
    sleeper = subprocess.Popen(
        ["sleep", "1000"], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, cwd="/"
    )
    code, said = attempt([settings.criu, "dump", "-t", sleeper.pid, "-D", images], settings)
    sleeper.kill()
    sleeper.wait()
    if code == 0:
        code, said = attempt([settings.criu, "restore", "-d", "-D", images], settings)
    found["works"] = code == 0 and processes.is_alive(sleeper.pid)
    if found["works"]:
        processes.kill(sleeper.pid)
    else:
        found["why_not"] = " | ".join(filter(None, [f"exit code {code}", processes.tail(said), found["check"]]))
    shutil.rmtree(images, ignore_errors=True)
    return found


def first(text):
    return text.splitlines()[0] if text.strip() else ""


def os_name():
    try:
        with open("/etc/os-release") as file:
            fields = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
        return fields.get("PRETTY_NAME", "").strip('"')
    except OSError:
        return "unknown"


def cpu():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "unknown"


def memory(name):
    """Bytes of a line of /proc/meminfo."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def bundle(settings):
    try:
        with open(os.path.join(settings.root, "bundle.json")) as file:
            return json.load(file)
    except OSError:
        return {}


def nvidia_smi():
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return said.stdout.strip() or said.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not there ({error})"


def find_driver():
    """Where the dynamic loader finds the driver, asked in a process of its own."""
    script = (
        f"import ctypes; ctypes.CDLL({DRIVER!r}); "
        f"print(next(line.split()[-1] for line in open('/proc/self/maps') if 'libcuda.so' in line))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return said.stdout.strip() or None


def ask_driver(settings, libcuda, limit_s=60):
    if not libcuda:
        return {"driver": None}
    code, said = attempt([sys.executable, "-c", ASK_DRIVER, libcuda], settings, limit_s)
    for line in said.splitlines():
        if code == 0 and line.startswith("driver "):
            return {"driver": json.loads(line[7:])}
    return {"driver": None, "driver_error": processes.tail(said)}


def ask_torch(settings):
    code, said = attempt([settings.python, "-c", ASK_TORCH], settings, limit_s=120)
    for line in said.splitlines():
        if code == 0 and line.startswith("torch "):
            return {"torch": json.loads(line[6:])}
    return {"torch": None, "torch_error": processes.tail(said, 1)}


def mount_fast(path):
    """A tmpfs with huge pages, if this process may mount: images of peers and stores lie there, so that no disk is
    measured."""
    os.makedirs(path, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    for options in (b"size=100%,huge=always,mode=0700", b"size=100%,mode=0700"):
        if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options) == 0:
            return True
    return False


def unmount(path):
    ctypes.CDLL(None).umount2(os.fsencode(path), 2)
