"""As tcp.py without SO_REUSEADDR: when the job is killed, TIME_WAIT holds the listener's port a minute."""

import socket

import tcp

tcp.main(socket.AF_INET, "127.0.0.1", reuse=0)
