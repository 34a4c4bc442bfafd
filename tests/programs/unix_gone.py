"""A listener whose directory is removed after the snapshot: directory and name are back after a resume."""

import os
import shutil
import socket
import tempfile

from harness import equal, passed, start, wait

start()
directory = tempfile.mkdtemp()
path = os.path.join(directory, "listener")
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()


def tick():
    """After the snapshot, but before the kill, the directory is removed."""
    if os.path.exists("saved"):
        shutil.rmtree(directory, ignore_errors=True)


wait(tick)

equal(server.getsockname(), path, "name")
client = socket.socket(socket.AF_UNIX)
client.connect(path)
connection, _ = server.accept()
client.send(b"hello")
equal(connection.recv(10), b"hello", "message")
shutil.rmtree(directory, ignore_errors=True)
passed()
