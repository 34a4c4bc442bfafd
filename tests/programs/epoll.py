"""An epoll set with pending, masked and edge-triggered descriptors, itself in another: events, changes."""

import os
import select

from harness import equal, passed, start, wait

start()
ready, silent, outer = os.eventfd(1), os.eventfd(0), select.epoll()
r, w = os.pipe()
epoll = select.epoll()
epoll.register(ready, select.EPOLLIN)
epoll.register(silent, select.EPOLLIN)
epoll.register(r, select.EPOLLIN | select.EPOLLET)
epoll.register(w, 0)
outer.register(epoll.fileno(), select.EPOLLIN)
os.write(w, b"edge")

wait()

equal(dict(epoll.poll(5)), {ready: select.EPOLLIN, r: select.EPOLLIN}, "pending events")
equal(dict(epoll.poll(5)), {ready: select.EPOLLIN}, "pending events without the edge")
equal(dict(outer.poll(5)), {epoll.fileno(): select.EPOLLIN}, "events of the outer set")
os.eventfd_write(silent, 1)
os.eventfd_read(ready)
equal(dict(epoll.poll(5)), {silent: select.EPOLLIN}, "event of the silent one")
epoll.modify(silent, 0)
epoll.modify(w, select.EPOLLOUT)
equal(dict(epoll.poll(5)), {w: select.EPOLLOUT}, "event after changes")
epoll.unregister(w)
equal(epoll.poll(0), [], "events at the end")
passed()
