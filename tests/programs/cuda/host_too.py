"""Ranks that use NCCL and the host between each other, as PyTorch's ranks do with a group of gloo beside that of NCCL.

    torchrun --nproc_per_node=RANKS host_too.py STEPS LOG     with three ranks or more

State is on the GPU of each rank. Each step has collectives of NCCL, and collectives, messages and a barrier of gloo.
Two of each PERIOD steps have a part in which no cut is possible: rank 0 has begun a collective of all ranks, the others
wait on the host for what it says after a later one. Were it parked between the two, they would not get to the first:

    run_ahead    rank 0 launches some collectives of all ranks before it says by gloo how many they are
    tell_last    ranks 0 and the last one have some of their own before rank 0 writes a key that the others wait for

As long as the file `hold` is there, the latter go on in `tell_last`, which the file `begun` says. Rank 0 removes both when
a collective has taken HELD_S: a cut has parked it. How many they are does not change the result.

Rank 0 appends a line for each step to the log. Ranks rest after a step as long as the file `slow` is there, and end once
rank 0 has found the file `enough`.
"""

import ctypes
import os
import sys
import time
import zlib

import torch
import torch.distributed as dist

COUNT, PERIOD = 256, 8
LAUNCHES, PAUSE_S, HELD_S, REST_S = 3, 0.002, 3, 0.04
UINT32, SUM, MAX, NON_BLOCKING = 3, 0, 2, 1

# mix(data, n, salt): data[i] = data[i] * 1664525 + (salt ^ i).
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry mix(.param .u64 p0, .param .u32 p1, .param .u32 p2)
{
    .reg .pred %p;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p0];
    ld.param.u32 %r1, [p1];
    ld.param.u32 %r2, [p2];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r3, %r3, %r4, %r5;
    setp.ge.u32 %p, %r3, %r1;
    @%p ret;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r3, 4;
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u32 %r6, [%rd2];
    mul.lo.u32 %r6, %r6, 1664525;
    xor.b32 %r7, %r2, %r3;
    add.u32 %r6, %r6, %r7;
    st.global.u32 [%rd2], %r6;
    ret;
}
"""


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


class Library:
    """Calls that have to succeed."""

    def __init__(self, name):
        self.library = ctypes.CDLL(name)

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            result = function(*arguments)
            if result != 0:
                raise RuntimeError(f"{name}: {result}")

        return call


cuda, nccl = Library("libcuda.so.1"), Library("libnccl.so.2")


def made(call, *arguments):
    """The pointer that a call returns by its first parameter."""
    pointer = ctypes.c_void_p()
    call(ctypes.byref(pointer), *arguments)
    return pointer


class Communicator:
    """Some ranks of the job, in their order. Collectives run on a stream of its own."""

    def __init__(self, store, ranks):
        self.is_member = dist.get_rank() in ranks
        if not self.is_member:
            return
        unique, key = UniqueId(), f"id of {ranks}"
        if dist.get_rank() == ranks[0]:
            nccl.ncclGetUniqueId(ctypes.byref(unique))
            store.set(key, bytes(unique.bytes))
        unique = UniqueId.from_buffer_copy(store.get(key))
        self.stream = made(cuda.cuStreamCreate, NON_BLOCKING)
        self.pointer = made(nccl.ncclCommInitRank, len(ranks), unique, ranks.index(dist.get_rank()))

    def all_reduce(self, data, operation):
        size = ctypes.c_size_t(COUNT)
        nccl.ncclAllReduce(data, data, size, UINT32, operation, self.pointer, self.stream)

    def wait(self):
        cuda.cuStreamSynchronize(self.stream)

    def destroy(self):
        if self.is_member:
            nccl.ncclCommDestroy(self.pointer)


class Rank:
    def __init__(self):
        # Both ways to the other ranks, on the host.
        store, self.rank, self.ranks = next(dist.rendezvous("env://"))
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks)
        self.store = dist.PrefixStore("job", store)
        device = ctypes.c_int()
        cuda.cuInit(0)
        cuda.cuDeviceGet(ctypes.byref(device), self.rank)
        cuda.cuCtxSetCurrent(made(cuda.cuDevicePrimaryCtxRetain, device))
        self.mix_function = made(cuda.cuModuleGetFunction, made(cuda.cuModuleLoadData, PTX), b"mix")
        self.world = Communicator(self.store, list(range(self.ranks)))
        self.ends = Communicator(self.store, [0, self.ranks - 1])
        self.summed, self.highest, self.of_ends = (self.device_memory(self.rank + i) for i in range(3))
        self.host = (ctypes.c_uint32 * COUNT)()

    def device_memory(self, value):
        data = made(cuda.cuMemAlloc_v2, ctypes.c_size_t(COUNT * 4))
        cuda.cuMemsetD32_v2(data, value, ctypes.c_size_t(COUNT))
        cuda.cuStreamSynchronize(None)
        return data

    def mix(self, data, salt, communicator):
        values = ctypes.c_void_p(data.value), ctypes.c_uint32(COUNT), ctypes.c_uint32(salt)
        parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        cuda.cuLaunchKernel(self.mix_function, COUNT // 64, 1, 1, 64, 1, 1, 0, communicator.stream, parameters, None)

    def download(self, data):
        cuda.cuMemcpyDtoH_v2(self.host, data, ctypes.c_size_t(COUNT * 4))
        return bytes(self.host)

    def run_ahead(self, step):
        """A maximum of all ranks, several times: once more changes nothing."""
        self.mix(self.highest, step + self.rank, self.world)
        count = torch.tensor(0)
        if self.rank == 0:
            for _ in range(LAUNCHES):
                self.world.all_reduce(self.highest, MAX)
                count += 1
                time.sleep(PAUSE_S)
            for other in range(1, self.ranks):
                dist.send(count, other)
        else:
            dist.recv(count, 0)
            for _ in range(count.item()):
                self.world.all_reduce(self.highest, MAX)
        self.world.wait()

    def tell_last(self, step):
        key = f"step {step}"
        if not self.ends.is_member:
            self.store.get(key)
        self.world.all_reduce(self.summed, SUM)
        if self.ends.is_member:
            self.mix(self.of_ends, step + self.rank, self.ends)
            self.maximum_of_the_ends()
        if self.rank == 0:
            self.store.set(key, b"")
        self.world.wait()

    def maximum_of_the_ends(self):
        """Several times too. Rank 0 says by gloo whether it goes on."""
        goes_on, count = torch.tensor(1), 0
        while goes_on.item():
            count += 1
            if self.rank == 0:
                goes_on.fill_(count < LAUNCHES or self.is_held())
                dist.send(goes_on, self.ranks - 1)
            else:
                dist.recv(goes_on, 0)
            begun = time.monotonic()
            self.ends.all_reduce(self.of_ends, MAX)
            self.ends.wait()
            if self.rank == 0 and time.monotonic() - begun > HELD_S and os.path.exists("hold"):
                os.remove("hold")
                os.remove("begun")
            time.sleep(PAUSE_S)

    def is_held(self):
        if not os.path.exists("hold"):
            return False
        open("begun", "w").close()
        return True

    def sum_on_the_host(self, data):
        shared = torch.frombuffer(bytearray(self.download(data)), dtype=torch.int32)
        dist.all_reduce(shared)
        cuda.cuMemcpyHtoD_v2(data, ctypes.c_void_p(shared.data_ptr()), ctypes.c_size_t(COUNT * 4))

    def exchange(self, step):
        """Returns a checksum of what all ranks have on the GPU: each passes the sum of the ranks before it on, by gloo."""
        data = self.download(self.summed) + self.download(self.highest) + self.download(self.of_ends)
        checksum, passed = zlib.crc32(data, step), torch.tensor(0)
        if self.rank > 0:
            dist.recv(passed, self.rank - 1)
        if self.rank + 1 < self.ranks:
            dist.send(passed + checksum, self.rank + 1)
        total = torch.tensor(checksum)
        dist.all_reduce(total)
        if self.rank == self.ranks - 1 and passed.item() + checksum != total.item():
            raise RuntimeError(f"step {step}: {passed.item()} + {checksum} is not {total.item()}")
        dist.barrier()
        return total.item()

    def is_enough(self):
        is_enough = torch.tensor(int(self.rank == 0 and os.path.exists("enough")))
        dist.broadcast(is_enough, 0)
        return is_enough.item()

    def step(self, step):
        self.mix(self.summed, step + self.rank, self.world)
        self.world.all_reduce(self.summed, SUM)
        self.mix(self.of_ends, step * self.rank, self.world)
        self.world.wait()
        self.sum_on_the_host(self.of_ends)
        if step % PERIOD == 2:
            self.run_ahead(step)
        elif step % PERIOD == 6:
            self.tell_last(step)
        return self.exchange(step)


def main():
    rank = Rank()
    log = open(sys.argv[2], "a", buffering=1) if rank.rank == 0 else None
    for step in range(1, int(sys.argv[1]) + 1):
        checksum = rank.step(step)
        if log:
            log.write(f"step {step} checksum {checksum}\n")
        if rank.is_enough():
            break
        if os.path.exists("slow"):
            time.sleep(REST_S)
    rank.ends.destroy()
    rank.world.destroy()
    dist.destroy_process_group()


main()
