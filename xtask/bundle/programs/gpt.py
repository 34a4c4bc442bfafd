"""A GPT-like model in bf16 with AdamW and deterministic kernels. It knows nothing of ckpt-run.

The loss hangs on all of the job's state: weights, both moments of AdamW, the generator of the batches. Two runs with the
same arguments have the same losses, bit for bit.

While it runs, the harness asks its first rank (a file `ask` in the working directory, see ask.h) for `gap`, `steps` and
`losses`, or has it save itself as a training script would: `torch-save PATH`, `dcp-save PATH`.
"""

import argparse
import math
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# On a CPU: a job has no AMX (docs/limits.md), and a run without ckpt-run must compute the same bits.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

RANK = int(os.environ.get("RANK", "0"))

import torch
import torch.nn.functional as F
from torch import nn

# Weights, gradients and two moments, in bf16.
BYTES_PER_PARAMETER = 8


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Parameter(torch.zeros(args.length, args.width))
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.last = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class Tokens(torch.utils.data.Dataset):
    """Batches for the workers of a DataLoader, each the same in every run."""

    def __init__(self, args):
        self.args = args

    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * RANK + index)
        return torch.randint(self.args.vocabulary, (self.args.batch, self.args.length), generator=generator)


def loaded(args, device):
    """Batches by workers that live as long as the job, through pinned memory."""
    loader = torch.utils.data.DataLoader(
        Tokens(args), batch_size=None, num_workers=args.workers, pin_memory=True, persistent_workers=True
    )
    while True:
        for tokens in loader:
            yield tokens.to(device, non_blocking=True)


def share_one_gpu():
    """Lets NCCL have several ranks on one GPU: by its own setting from 2.30.3 on, before as ranks of different machines."""
    if torch.cuda.nccl.version() >= (2, 30, 3):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"rank-{RANK}"
    os.environ["NCCL_NET"] = "Socket"


def layers_for(gigabytes, width, vocabulary):
    """How many layers make so much state."""
    parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
    return max(1, round((parameters - 2 * vocabulary * width) / (12 * width * width)))


class Training:
    def __init__(self, args):
        self.args = args
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.device = torch.device(args.device)
        # Made where it stays and in bf16 at once, so that it never takes more memory than it says. gloo of older versions
        # has no bf16.
        torch.set_default_dtype(torch.float32 if args.wrap and args.device == "cpu" else torch.bfloat16)
        with torch.device(self.device) if hasattr(torch.device, "__enter__") else torch.no_grad():
            self.model = Gpt(args).to(self.device)
        self.distributed = None
        if args.distributed:
            import torch.distributed as distributed

            distributed.init_process_group(args.distributed)
            self.distributed = distributed
        if args.wrap:
            self.model = wrapped(self.model, args.wrap)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.forward = torch.compile(self.model, mode="reduce-overhead") if args.compile else self.model
        self.batches = torch.Generator(device=self.device).manual_seed(2 + RANK)
        self.source = loaded(args, self.device) if args.workers else None
        self.losses = []
        if args.with_cudnn:
            F.conv2d(torch.ones(1, 8, 32, 32, device=self.device), torch.ones(8, 8, 3, 3, device=self.device))

    def tokens(self):
        if self.source:
            return next(self.source)
        shape = (self.args.batch, self.args.length)
        return torch.randint(self.args.vocabulary, shape, generator=self.batches, device=self.device)

    def step(self):
        args, tokens = self.args, self.tokens()
        # The next token is the one before: something that can be learnt.
        logits = self.forward(tokens)
        loss = F.cross_entropy(logits[:, 1:].reshape(-1, args.vocabulary).float(), tokens[:, :-1].reshape(-1))
        loss.backward()
        if self.distributed and not args.wrap:
            self.add_up(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())

    def add_up(self, loss):
        """What data-parallel ranks do: with one rank, the sum is what it was."""
        if self.args.distributed == "nccl":
            for parameter in self.model.parameters():
                self.distributed.all_reduce(parameter.grad)
        else:
            mean = loss.detach().float().cpu()
            self.distributed.all_reduce(mean)

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.get_state(),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }

    def torch_save(self, path):
        begun = time.monotonic()
        with open(path, "wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())
        took = time.monotonic() - begun
        return f"{took:.6f} {took:.6f}"

    def torch_load(self, path):
        self.take(torch.load(path, map_location=self.device))

    def dcp_state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "batches": self.batches.get_state()}

    def dcp_save(self, path):
        """Seconds that the training stood still; the other number comes when the future is done."""
        import torch.distributed.checkpoint as dcp

        begun = time.monotonic()
        future = dcp.async_save(self.dcp_state(), checkpoint_id=path)
        stall = time.monotonic() - begun

        def done(_):
            with open(path + ".done.part", "w") as file:
                file.write(f"{time.monotonic() - begun:.6f}")
            os.rename(path + ".done.part", path + ".done")

        future.add_done_callback(done)
        return f"{stall:.6f}"

    def dcp_load(self, path):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.dcp_state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.batches.set_state(state["batches"].cpu())

    def take(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.set_state(state["batches"].cpu())
        self.losses = state["losses"].tolist()


def wrapped(model, how):
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model)


class Profile:
    """torch.profiler, as long as a file exists."""

    def __init__(self, name):
        self.name, self.profiler = name, None

    def before_step(self):
        is_wanted = os.path.exists(self.name)
        if is_wanted and self.profiler is None:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        elif self.profiler and not is_wanted:
            self.profiler.stop()
            self.profiler = None


class Harness:
    """The questions of the harness."""

    def __init__(self, training):
        self.training = training
        self.last = self.since = time.monotonic()
        self.gap = 0.0
        self.counted = 0

    def after_step(self):
        self.counted += 1
        now = time.monotonic()
        self.gap = max(self.gap, now - self.last)
        self.last = now
        if RANK == 0 and os.path.exists("ask"):
            with open("ask") as file:
                word, _, path = file.read().strip().partition(" ")
            os.unlink("ask")
            text = self.answer(word, path)
            with open("answer.part", "w") as file:
                file.write(text)
            os.rename("answer.part", "answer")
            self.last = time.monotonic()

    def answer(self, word, path):
        if word == "gap":
            gap, self.gap = self.gap, 0.0
            return f"{gap:.6f}"
        if word == "steps":
            now = time.monotonic()
            text = f"{self.counted} {now - self.since:.6f}"
            self.counted, self.since = 0, now
            return text
        if word == "losses":
            return "\n".join(loss.hex() for loss in self.training.losses)
        if word == "torch-save":
            return self.training.torch_save(path)
        if word == "dcp-save":
            return self.training.dcp_save(path)
        return f"unknown word {word}"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", type=float, help="choose the layers so that the state has this size")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="end after so many; 0: never")
    parser.add_argument("--rest-ms", type=float, default=0.0)
    parser.add_argument("--slow-while", metavar="FILE", help="rest only while this file exists, longer in the second half")
    # Not `--log`: some versions of torchrun take that for the start of an option of their own.
    parser.add_argument("--losses", help="append a line per step to this file")
    parser.add_argument("--times", help="write the seconds of each step to this file at the end")
    parser.add_argument("--distributed", choices=["nccl", "gloo"])
    parser.add_argument("--wrap", choices=["ddp", "fsdp"], help="how the ranks share the model")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks use the first GPU, also with NCCL")
    parser.add_argument("--workers", type=int, default=0, help="workers of a DataLoader that make the batches")
    parser.add_argument("--compile", action="store_true", help="torch.compile, with CUDA graphs")
    parser.add_argument("--profile-while", metavar="FILE", help="under torch.profiler while this file exists")
    parser.add_argument("--with-cudnn", action="store_true", help="begin with a convolution, so that cuDNN is loaded")
    parser.add_argument("--torch-load", metavar="PATH")
    parser.add_argument("--dcp-load", metavar="PATH")
    args = parser.parse_args()
    if args.gigabytes:
        args.layers = layers_for(args.gigabytes, args.width, args.vocabulary)
    return args


def main():
    args = parse_args()
    if args.one_gpu and args.distributed == "nccl":
        share_one_gpu()
    training = Training(args)
    if args.torch_load:
        training.torch_load(args.torch_load)
    if args.dcp_load:
        training.dcp_load(args.dcp_load)
    harness = Harness(training)
    log = open(args.losses, "a", buffering=1) if args.losses and RANK == 0 else None
    profile = Profile(args.profile_while) if args.profile_while else None
    times = []
    step = len(training.losses)
    while args.steps == 0 or step < args.steps:
        begun = time.monotonic()
        if profile:
            profile.before_step()
        training.step()
        times.append(time.monotonic() - begun)
        step += 1
        if log:
            log.write(f"step {step} loss {training.losses[-1]:.6f} bits {training.losses[-1].hex()}\n")
        harness.after_step()
        if args.rest_ms and (args.slow_while is None or os.path.exists(args.slow_while)):
            # Nobody who has slowed it down wants to see its end.
            is_late = args.slow_while and 0 < args.steps / 2 < step
            time.sleep(args.rest_ms / 1000 * (10 if is_late else 1))
    if args.times:
        with open(args.times, "w") as file:
            file.write("\n".join(f"{seconds:.9f}" for seconds in times))
    if training.distributed:
        training.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
