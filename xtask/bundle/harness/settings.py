"""Where things are, and how much is done."""

import os


class Settings:
    """Read from the environment; see README.md for the variables."""

    def __init__(self, work, facts=None):
        env = os.environ
        self.root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        self.work = work
        self.out = os.path.abspath(env.get("OUT", "./out"))
        self.fast = os.path.join(work, "fast")
        self.ckpt_run = self.at("bin/ckpt-run")
        self.interposer = self.at("lib/libckpt_interpose.so")
        self.criu = env.get("BUNDLE_CRIU") or self.at("criu/bin/criu")
        self.python = env.get("BUNDLE_PYTHON", "python3")
        self.cuda_python = env.get("BUNDLE_CUDA_PYTHON", self.python)
        self.libcuda = env.get("BUNDLE_LIBCUDA") or None
        self.torch_device = env.get("BUNDLE_TORCH_DEVICE", "cuda")
        # Everything small, so that it ends in a minute or two: to see whether the bundle itself works.
        self.is_quick = env.get("BUNDLE_QUICK") == "1"
        self.only = env.get("BUNDLE_ONLY")
        self.facts = facts or {}
        self.sizes_gb = [float(word) for word in env.get("BUNDLE_SIZES_GB", "1,10,40,80").split(",")]
        self.torch_gb = float(env.get("BUNDLE_TORCH_GB", "10"))

    def at(self, path):
        return os.path.join(self.root, path)

    def env(self, **more):
        """The environment of programs: that of the caller without options of ckpt-run, and with the driver that was
        named."""
        ours = ("CKPT_", "BUNDLE_")
        # What stands for a driver's device files where the bundle itself is tried.
        kept = "CKPT_TEST_DEVICE_FILES"
        env = {name: value for name, value in os.environ.items() if name == kept or not name.startswith(ours)}
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # The ends of messages are what is shown.
        env["RUST_BACKTRACE"] = "0"
        if self.libcuda:
            before = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = os.path.dirname(self.libcuda) + (f":{before}" if before else "")
        env.update(more)
        return env

    def limit_s(self, stage):
        """How long a stage may take."""
        own = os.environ.get("BUNDLE_LIMIT_S")
        return float(own) if own else LIMITS_S[stage]


# How long each stage may take, in their order.
LIMITS_S = {
    "facts": 390,
    "driver": 80,
    "memory": 110,
    "process": 150,
    "programs": 160,
    "frameworks": 200,
    "nccl": 140,
    "torchrun": 90,
    "peers": 160,
    "speed": 280,
    "kill": 40,
}
# Stages of one call each, where a call may take ten minutes and all together half an hour.
CALLS = [
    ["facts"],
    ["driver", "memory", "process"],
    ["programs", "frameworks", "nccl"],
    ["torchrun", "peers", "speed"],
    ["kill"],
]
