"""As asyncio_loop.py on uvloop, which asks for an io_uring at its start; exit code 77 without uvloop."""

import asyncio

import asyncio_loop
from harness import passed, start, unavailable

if __name__ == "__main__":
    try:
        import uvloop
    except ImportError as e:
        unavailable(e)
    start()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(asyncio_loop.run())
    passed()
