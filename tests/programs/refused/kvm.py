"""An open /dev/kvm: the hypervisor's version is asked."""

import fcntl
import os

import _path  # noqa: F401
from harness import equal, passed, start, unavailable, wait

KVM_GET_API_VERSION = 0xAE00
start()
try:
    fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    version = fcntl.ioctl(fd, KVM_GET_API_VERSION)
except OSError as e:
    unavailable(e)

wait()

equal(fcntl.ioctl(fd, KVM_GET_API_VERSION), version, "version of the interface")
passed()
