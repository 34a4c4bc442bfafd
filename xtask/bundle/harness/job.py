"""A job under ckpt-run."""

import json
import os
import re
import shutil
import subprocess
import time
from datetime import datetime

from harness import processes
from harness.asking import Asked
from harness.records import Fail


# What an attempt comes to.
SAVED, REFUSED = "saved", "refused"
# A resume may wait for ports that the job has had, up to 75 s.
RESUME_LIMIT_S = 150
# How a line of its log begins.
STAMP = "%Y-%m-%dT%H:%M:%S.%f%z"


class Ended(Fail):
    """The job was done before it could be killed."""


class Job(Asked):
    """It is run in a directory of its own; the very same command resumes it."""

    def __init__(self, settings, name, argv, on_gpu=True, env=None):
        super().__init__(os.path.join(settings.work, "jobs", name))
        self.settings = settings
        self.name = name
        self.argv = [str(word) for word in argv]
        self.store = os.path.join(settings.fast, f"store-{name}")
        self.interpose = settings.interposer if on_gpu else "off"
        self.more_env = env or {}
        self.process = None
        self.runs = 0
        shutil.rmtree(self.directory, ignore_errors=True)
        os.makedirs(self.directory)

    def env(self):
        own = {"CKPT_STORE": self.store, "CKPT_CRIU": self.settings.criu, "CKPT_FILES_EXCLUDE": "ask*,answer*"}
        return self.settings.env(**own, **self.more_env)

    def start(self):
        """Starts or resumes it."""
        self.forget()
        self.runs += 1
        self.log = os.path.join(self.settings.work, "logs", f"{self.name}-{self.runs}.log")
        command = [self.settings.ckpt_run, "--interval", "off", "--interpose", self.interpose]
        out = open(self.path("output.txt"), "a")
        self.begun, self.begun_unix_s = time.monotonic(), time.time()
        self.process = subprocess.Popen(
            command + ["--log-file", self.log, "--"] + self.argv,
            cwd=self.directory,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=open(self.log + ".stderr", "w"),
        )
        return self

    def wrong(self):
        code = self.process.poll()
        if code == 0:
            raise Ended(f"{self.name} was done too early: {self.said()}")
        return None if code is None else f"ckpt-run has ended with {code}: {self.said()}"

    def said(self):
        text = ""
        for path in (self.log, self.log + ".stderr"):
            if os.path.exists(path):
                with open(path, errors="replace") as file:
                    text += file.read()
        return processes.tail(text)

    def call(self, *words, limit_s=400):
        argv = [self.settings.ckpt_run, *words]
        code, said = processes.run(argv, limit_s, apart=True, cwd=self.directory, env=self.env())
        if code != 0:
            raise Fail(f"ckpt-run {' '.join(words)} failed with {code}: {processes.tail(said)} {self.said()}")
        return said

    def until_answering(self):
        """Waits until the launcher can be called."""

        def answers():
            try:
                jobs = json.loads(self.call("status", "--json"))
            except Fail:
                return None
            return any(job.get("launcher_pid") == self.process.pid for job in jobs)

        processes.until("the launcher", answers, RESUME_LIMIT_S, self.wrong)
        return self

    def checkpoint(self):
        """Takes a snapshot: what ckpt-run says of it, with what it says of the GPU."""
        begun = time.monotonic()
        saved = json.loads(self.call("checkpoint", "--json"))
        saved["call_s"] = time.monotonic() - begun
        saved["gpu"] = json.loads(self.call("show", saved["id"], "--json")).get("gpu_processes", [])
        return saved

    def attempt(self):
        """A checkpoint that may be refused: the outcome, and the reason."""
        argv = [self.settings.ckpt_run, "checkpoint", "--json"]
        code, said = processes.run(argv, 400, apart=True, cwd=self.directory, env=self.env())
        if code == 0:
            return {"outcome": SAVED, "stall_s": json.loads(said)["stall_s"]}
        if self.process.poll() is not None:
            raise Fail(f"{self.name} has ended after a checkpoint that failed: {self.said()}")
        return {"outcome": REFUSED, "reason": processes.tail(said)}

    def only_checkpoint(self):
        """Takes a snapshot for which older ones make room, and asks the job for how long it stood still."""
        for old in json.loads(self.call("ls", "--json")):
            self.call("rm", "--force", old["id"])
        self.gap_s()
        saved = self.checkpoint()
        saved["gap_s"] = self.gap_s()
        return saved

    def device_memory(self):
        return json.loads(self.call("status", "--json"))[0].get("device_memory")

    def slow_down(self):
        open(self.path("slow"), "w").close()

    def full_speed(self):
        os.unlink(self.path("slow"))

    def kill(self):
        """SIGKILL to the launcher and all that is below it."""
        below = processes.descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in below:
            processes.kill(pid)
        processes.until("the end of the job", lambda: not any(map(processes.is_alive, below)), 30)

    def wait(self, limit_s):
        limit_s *= processes.PATIENCE
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Fail(f"{self.name} was not done after {limit_s:.0f} s: {self.said()}") from None
        if code != 0:
            raise Fail(f"{self.name} ended with {code}: {self.said()}")

    def resumed_s(self):
        """How long ckpt-run says the resume took, which it says when the job runs already; a failure if it did not
        resume."""

        def told():
            with open(self.log, errors="replace") as file:
                found = re.search(r"resumed from snapshot .* in ([0-9.]+) s", file.read())
            return float(found.group(1)) if found else None

        return processes.until("a resume", told, RESUME_LIMIT_S, self.wrong)

    def said_at(self, text):
        """When the launcher last said this in its log, in seconds since 1970; None if it did not."""
        with open(self.log, errors="replace") as file:
            stamps = [line.split()[0] for line in file if text in line]
        # Of the digits behind the point, Python 3.8 reads six.
        return datetime.strptime(stamps[-1][:26].rstrip("Z") + "Z", STAMP).timestamp() if stamps else None

    def parts(self, of, begun_s):
        """Seconds of the last pause or of a resume, as far as they are in the log: until an agent gets its mirror (the
        dump, or the load from the store and CRIU's restore), and from then until it is back."""
        delivered, returned = self.said_at("delivering mirror"), self.said_at("an agent has returned")
        if None in (begun_s, delivered, returned):
            return {}
        return {f"{of}_until_delivered_s": delivered - begun_s, f"{of}_until_returned_s": returned - delivered}

    def drop(self):
        """Ends it and removes its store: there may be no room for a second one."""
        if self.process and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.store, ignore_errors=True)


def bytes_of(saved):
    """Device memory that a snapshot has captured, in bytes."""
    return sum(region["bytes"] for process in saved["gpu"] for region in process["regions"])


def times_of(saved):
    """The longest of each step over the processes, seconds."""
    names = ("drain_s", "capture_s", "release_s", "driver_s")
    return {name: max([process["times"][name] for process in saved["gpu"]] or [0.0]) for name in names}
