"""asyncio: timers, a TCP echo pair with an answer under way, a subprocess and a thread pool on one loop."""

import asyncio

from harness import await_go, check, equal, passed, start, wait


async def echo(reader, writer):
    while line := await reader.readline():
        if line == b"slow\n":
            await asyncio.get_running_loop().run_in_executor(None, await_go)
        writer.write(line.upper())
        await writer.drain()
    writer.close()


async def count(ticks):
    while True:
        await asyncio.sleep(0.02)
        ticks.append(asyncio.get_running_loop().time())


async def run():
    loop = asyncio.get_running_loop()
    ticks = []
    counter = asyncio.create_task(count(ticks))
    late = loop.create_future()
    loop.call_later(1.5, late.set_result, "late")
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    cat = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    writer.write(b"before\n")
    equal(await reader.readline(), b"BEFORE\n", "echo before")
    writer.write(b"slow\n")

    await loop.run_in_executor(None, wait)

    equal(await reader.readline(), b"SLOW\n", "answer that was under way")
    writer.write(b"later\n")
    equal(await reader.readline(), b"LATER\n", "echo")
    equal(await late, "late", "timer")
    n = len(ticks)
    await asyncio.sleep(0.3)
    check(len(ticks) > n, "the periodic task has stopped")
    cat.stdin.write(b"through cat\n")
    equal(await cat.stdout.readline(), b"through cat\n", "line through the subprocess")
    cat.stdin.close()
    equal(await cat.wait(), 0, "exit code of the subprocess")
    reader2, writer2 = await asyncio.open_connection("127.0.0.1", port)
    writer2.write(b"new\n")
    equal(await reader2.readline(), b"NEW\n", "echo to a new client")
    counter.cancel()
    for end in (writer, writer2):
        end.close()
    server.close()


if __name__ == "__main__":
    start()
    asyncio.run(run())
    passed()
