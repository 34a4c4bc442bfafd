"""What a library of NVIDIA's says on a machine without a GPU: runtime.py cudart|nccl LIBRARY.

Prints each call with its result and the result's text; then in which file the function lies by which a runtime looks
up all others.
"""

import ctypes
import sys


def file_of(address):
    """The name of the file that is mapped there."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            words = line.split()
            begin, end = (int(word, 16) for word in words[0].split("-"))
            if begin <= address < end:
                return words[-1].rsplit("/", 1)[-1]
    return "no file"


def cudart(library):
    number, pointer = ctypes.c_int(-1), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p
    properties = ctypes.create_string_buffer(1 << 14)

    def call(name, *arguments):
        result = getattr(library, name)(*arguments)
        text, code = library.cudaGetErrorString(result).decode(), library.cudaGetErrorName(result).decode()
        print(name, result, text, code, number.value, sep=", ", flush=True)

    by = ctypes.byref
    for name in ("cudaRuntimeGetVersion", "cudaDriverGetVersion", "cudaGetDeviceCount", "cudaGetDevice"):
        call(name, by(number))
    call("cudaPeekAtLastError")
    call("cudaGetLastError")
    call("cudaGetLastError")
    call("cudaSetDevice", 0)
    call("cudaFree", None)
    call("cudaMalloc", by(pointer), ctypes.c_size_t(1 << 20))
    call("cudaMallocManaged", by(pointer), ctypes.c_size_t(1 << 20), 1)
    call("cudaMallocAsync", by(pointer), ctypes.c_size_t(1 << 20), None)
    call("cudaHostAlloc", by(pointer), ctypes.c_size_t(1 << 20), 0)
    call("cudaMemGetInfo", by(free), by(total))
    call("cudaStreamCreate", by(pointer))
    call("cudaEventCreate", by(pointer))
    call("cudaGetDeviceProperties", properties, 0)
    call("cudaDeviceSynchronize")
    call("cudaDeviceReset")


def nccl(library):
    number, communicator = ctypes.c_int(-1), ctypes.c_void_p()
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p

    class UniqueId(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    def call(name, *arguments):
        if not hasattr(library, name):
            print(name, "none", "not in this version", sep=", ", flush=True)
            return
        result = getattr(library, name)(*arguments)
        text = library.ncclGetErrorString(result).decode()
        print(name, result, text, library.ncclGetLastError(None).decode(), number.value, sep=", ", flush=True)

    by = ctypes.byref
    unique = UniqueId()
    call("ncclGetVersion", by(number))
    call("ncclGetUniqueId", by(unique))
    library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    call("ncclCommInitRank", by(communicator), 1, unique, 0)
    call("ncclCommInitAll", by(communicator), 1, None)
    call("ncclMemAlloc", by(communicator), ctypes.c_size_t(1 << 20))


KINDS = {"cudart": cudart, "nccl": nccl}
KINDS[sys.argv[1]](ctypes.CDLL(sys.argv[2]))
look_up = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
print("cuGetProcAddress_v2 is in", file_of(ctypes.cast(look_up, ctypes.c_void_p).value))
