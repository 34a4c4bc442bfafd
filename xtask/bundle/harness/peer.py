"""A process saved by CRIU and the driver's own checkpoint, without ckpt-run."""

import ctypes
import os
import shutil
import subprocess
import sys
import time

from harness import processes
from harness.asking import Asked
from harness.records import Fail

LOCK_TIMEOUT_MS = 30_000
# CU_PROCESS_STATE_RUNNING
RUNNING = 0
DEVICES = "/dev/nvidia"
OPTIONS = ["--tcp-established", "--file-locks", "--link-remap"]


class Driver:
    """The driver's checkpoint API on another process. This process needs cuInit for it, and no context."""

    def __init__(self, libcuda):
        self.driver = ctypes.CDLL(libcuda)
        self.call("cuInit", ctypes.c_uint(0))

    def code(self, name, pid):
        """The result of a call that has a process and no other argument."""
        return getattr(self.driver, name)(ctypes.c_int(pid), None)

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(text))
            raise Fail(f"{name}: {(text.value or b'?').decode()} ({code})")

    def lock(self, pid):
        # CUcheckpointLockArgs: a time limit, then reserved fields that have to be 0.
        arguments = (ctypes.c_uint * 16)(LOCK_TIMEOUT_MS)
        self.call("cuCheckpointProcessLock", ctypes.c_int(pid), arguments)

    def state(self, pid):
        found = ctypes.c_int(-1)
        self.call("cuCheckpointProcessGetState", ctypes.c_int(pid), ctypes.byref(found))
        return found.value

    def checkpoint(self, pid):
        self.call("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), None)

    def restore(self, pid):
        self.call("cuCheckpointProcessRestore", ctypes.c_int(pid), None)

    def unlock(self, pid):
        self.call("cuCheckpointProcessUnlock", ctypes.c_int(pid), None)


class Peer(Asked):
    """A program that is started, saved, killed and brought back. `gently`: it is locked and checkpointed before it is
    killed, since killing a process that the driver has restored has hung machines."""

    def __init__(self, settings, name, argv, driver, gently=False):
        super().__init__(os.path.join(settings.work, "jobs", name))
        self.settings = settings
        self.driver = driver
        self.gently = gently
        self.name = name
        self.images = os.path.join(settings.fast, f"images-{name}")
        shutil.rmtree(self.directory, ignore_errors=True)
        os.makedirs(self.directory)
        self.log = os.path.join(settings.work, "logs", f"{name}.log")
        # A session of its own and no terminal: so CRIU can dump it by itself. Nothing is open that it would write on.
        self.process = subprocess.Popen(
            [str(word) for word in argv],
            cwd=self.directory,
            env=settings.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def wrong(self):
        return None if processes.is_alive(self.pid) else f"{self.name} has ended"

    def criu(self, *words):
        argv = [self.settings.criu, *words, "-D", self.images, *OPTIONS]
        code, said = processes.run(argv, 400, env=self.settings.env())
        if code != 0:
            log = os.path.join(self.images, f"{words[0]}.log")
            lines = open(log, errors="replace").read().splitlines() if os.path.exists(log) else []
            errors = [line for line in lines if "Error" in line]
            raise Fail(f"criu {words[0]} failed with {code}: {' | '.join(errors[:4]) or processes.tail(said)}")

    def timed(self, times, name, work):
        begun = time.monotonic()
        work()
        times[name] = time.monotonic() - begun

    def dump(self):
        """Saves it and lets it run on; seconds of each part. It stands still from the lock until the unlock."""
        shutil.rmtree(self.images, ignore_errors=True)
        os.makedirs(self.images)
        times, pid = {}, self.pid
        begun = time.monotonic()
        self.timed(times, "lock_s", lambda: self.driver.lock(pid))
        self.timed(times, "driver_checkpoint_s", lambda: self.driver.checkpoint(pid))
        options = ["--leave-running", "--network-lock", "skip", "--ghost-limit", "1G", "-o", "dump.log"]
        self.timed(times, "criu_s", lambda: self.criu("dump", "-t", str(pid), *options))
        self.timed(times, "driver_restore_s", lambda: self.driver.restore(pid))
        self.timed(times, "unlock_s", lambda: self.driver.unlock(pid))
        times["total_s"] = time.monotonic() - begun
        times["image_bytes"] = sum(entry.stat().st_size for entry in os.scandir(self.images))
        return times

    def leave_gpu(self):
        """By lock and checkpoint, as far as it is on it."""
        try:
            if self.driver.state(self.pid) == RUNNING:
                self.driver.lock(self.pid)
            self.driver.checkpoint(self.pid)
        except Fail as why:
            print(f"{self.name} is killed as it is: {why}", file=sys.stderr)

    def maps(self):
        """Its address ranges, and which of them and of its descriptors are the driver's."""
        with open(f"/proc/{self.pid}/maps") as file:
            lines = file.read().splitlines()
        open_files = []
        for entry in os.scandir(f"/proc/{self.pid}/fd"):
            try:
                open_files.append(os.readlink(entry.path))
            except FileNotFoundError:
                # It was closed meanwhile.
                pass
        return {
            "lines": lines,
            "ranges": [tuple(int(word, 16) for word in line.split()[0].split("-")) for line in lines],
            "device": [line for line in lines if DEVICES in line],
            "zero": [line for line in lines if "/dev/zero (deleted)" in line],
            "descriptors": sum(1 for path in open_files if path.startswith(DEVICES)),
        }

    def kill(self):
        if self.gently and processes.is_alive(self.pid):
            self.leave_gpu()
        processes.kill(self.pid)
        if self.process:
            self.process.wait()
            self.process = None
        # One that was restored is our child too: it was adopted. Its ID is free once it has been waited for.
        processes.until("its end", self.is_gone, 20)
        self.forget()

    def is_gone(self):
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pass
        return not os.path.exists(f"/proc/{self.pid}")

    def restore(self):
        """Brings it back; seconds of each part."""
        times, pid = {}, self.pid
        begun = time.monotonic()
        self.timed(times, "criu_s", lambda: self.criu("restore", "-d", "-o", "restore.log"))
        self.timed(times, "driver_restore_s", lambda: self.driver.restore(pid))
        self.timed(times, "unlock_s", lambda: self.driver.unlock(pid))
        times["total_s"] = time.monotonic() - begun
        return times

    def round_trip(self, patience_s):
        """Saves it, kills it and brings it back; what that took. It has `patience_s` to answer again."""
        dump = self.dump()
        stall_s = self.gap_s()
        self.kill()
        self.put("gap")
        begun = time.monotonic()
        restore = self.restore()
        self.take("gap", patience_s)
        resume_s = time.monotonic() - begun
        return {
            "stall_best_s": stall_s,
            "durable_s": dump["total_s"],
            "resume_s": resume_s,
            "dump": dump,
            "restore": restore,
        }

    def drop(self):
        if processes.is_alive(self.pid):
            self.kill()
        shutil.rmtree(self.images, ignore_errors=True)
