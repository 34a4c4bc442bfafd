"""The same as tcp.py over IPv6 loopback; exit code 77 without ::1."""

import socket

import tcp

tcp.main(socket.AF_INET6, "::1")
