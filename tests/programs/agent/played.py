"""Plays an agent of the interposer, without a GPU: what it answers is in files of the working directory.

`quiesce`: why it refuses to go away. `lost`: what it has lost when it is back. `delay_s`: how long it takes to come
back. It writes the requests that it has refused to `refused`, and ends when there is a file `go`.
"""

import json
import os
import select
import socket
import struct
import sys
import time

PATH = os.environ["CKPT_AGENT_SOCKET"]
LOOK_S = 0.01


def content(name):
    if not os.path.exists(name):
        return None
    with open(name) as file:
        return file.read()


def note(name, line):
    with open(name, "a") as file:
        print(line, file=file)


def start_time_ticks():
    return int(content("/proc/self/stat").rpartition(")")[2].split()[19])


def say(connection, **message):
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(text)) + text)


def hear(connection):
    (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
    return json.loads(connection.recv(length, socket.MSG_WAITALL))


def connected():
    while not os.path.exists(PATH):
        time.sleep(LOOK_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(PATH)
    return connection


def greet(connection, away):
    hello = {"version": 3, "pid": os.getpid(), "start_time_ticks": start_time_ticks(), "exe": sys.executable}
    say(connection, type="hello", **hello, **({} if away is None else {"away": away}))
    assert hear(connection) == {"type": "welcome", "version": 3}


def converse(connection):
    """Returns the attempt that it goes away for; None at the end of the job."""
    while not os.path.exists("go"):
        if not select.select([connection], [], [], LOOK_S)[0]:
            continue
        request = hear(connection)
        assert request["type"] == "quiesce" and request["timeout_ms"] > 0, request
        reason = content("quiesce")
        if reason is None:
            say(connection, type="quiesced", attempt=request["attempt"])
            return request["attempt"]
        note("refused", request["attempt"])
        say(connection, type="failed", attempt=request["attempt"], reason=reason)
    return None


def main():
    away = None
    began_ticks = start_time_ticks()
    note("log", "started")
    while True:
        connection = connected()
        greet(connection, away)
        if away is not None:
            lost = content("lost")
            restored = start_time_ticks() != began_ticks
            began_ticks = start_time_ticks()
            say(connection, type="back", attempt=away, restored=restored, **({"lost": lost} if lost else {}))
        note("ready", "")
        away = converse(connection)
        connection.close()
        if away is None:
            note("log", "pass")
            return
        delay_s = float(content("delay_s") or 0)
        while not os.path.exists(PATH):
            time.sleep(LOOK_S)
        time.sleep(delay_s)


main()
