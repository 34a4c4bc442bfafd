"""A pool of forked workers and a manager: a result under way, state of the workers, work afterwards."""

import multiprocessing as mp
import os

from harness import await_go, check, equal, passed, start, wait

calls = 0


def square(n):
    """Its result and how many calls this worker has had: state that only the worker has."""
    global calls
    calls += 1
    return n * n, os.getpid(), calls


def slow(n):
    await_go()
    return n + 1


def main(method):
    start()
    with mp.get_context(method).Pool(2) as pool, mp.get_context(method).Manager() as manager:
        before = []
        # One of them may begin so late that the other has done everything by then.
        while len({pid for _, pid, _ in before}) < 2:
            before += pool.map(square, range(20), chunksize=1)
        workers = {pid for _, pid, _ in before}
        last = {pid: max(c for _, p, c in before if p == pid) for pid in workers}
        shared = manager.dict(state="kept")
        under_way = pool.apply_async(slow, (41,))

        wait()

        equal(under_way.get(20), 42, "result that was under way")
        after = pool.map(square, range(20), chunksize=1)
        equal([n for n, _, _ in after], [n * n for n in range(20)], "results")
        for _, pid, count in after:
            check(count > last.get(pid, 0), f"worker {pid} has forgotten its calls")
        equal({pid for _, pid, _ in after} | workers, {p.pid for p in pool._pool}, "workers")
        shared["more"] = 1
        equal(dict(shared), {"state": "kept", "more": 1}, "content of the manager")
        pool.close()
        pool.join()
    passed()


if __name__ == "__main__":
    main("fork")
