"""Habits of embedded databases."""

import dbm.dumb
import os
import sqlite3

from habit import Habit, equal, pause


class _Sqlite(Habit):
    """Rows are inserted, changed and deleted in transactions."""

    JOURNAL = "delete"
    KEPT = True

    def connect(self):
        connection = sqlite3.connect(self.path("rows.sqlite"), isolation_level=None)
        mode = connection.execute(f"pragma journal_mode = {self.JOURNAL}").fetchone()
        equal(mode[0], self.JOURNAL, "the journal mode")
        connection.execute("pragma synchronous = off")
        return connection

    def begin(self):
        self.rows = {}
        self.connection = self.connect()
        self.connection.execute("create table rows (id integer primary key, text text)")
        self.release()

    def acquire(self):
        if not self.connection:
            self.connection = self.connect()
        return self.connection

    def release(self):
        if not self.KEPT:
            self.connection.close()
            self.connection = None

    def step(self, n):
        connection = self.acquire()
        connection.execute("begin immediate")
        connection.execute("insert into rows values (?, ?)", (n, self.line(n) * 5))
        pause()
        if n % 3 == 2:
            connection.execute("update rows set text = text || ? where id = ?", (self.line(n), n // 2))
        if n % 7 == 6:
            connection.execute("delete from rows where id = ?", (n // 3,))
        if n % 5 == 4:
            connection.execute("rollback")
        else:
            connection.execute("commit")
            self.apply(n)
        pause()
        self.release()

    def apply(self, n):
        self.rows[n] = self.line(n) * 5
        if n % 3 == 2 and n // 2 in self.rows:
            self.rows[n // 2] += self.line(n)
        if n % 7 == 6:
            self.rows.pop(n // 3, None)

    def check(self, n):
        connection = self.acquire()
        got = dict(connection.execute("select id, text from rows"))
        equal(got, self.rows, "the rows")
        self.release()

    def end(self):
        connection = self.acquire()
        equal(connection.execute("pragma integrity_check").fetchone()[0], "ok", "the integrity check")
        with open(self.path("dump.sql"), "w") as file:
            file.writelines(line + "\n" for line in connection.iterdump())
        # The header of a journal that stays has random numbers.
        connection.execute("pragma journal_mode = delete")
        connection.close()


class sqlite_rollback(_Sqlite):
    """SQLite with a rollback journal, the connection kept open."""


class sqlite_rollback_reopened(_Sqlite):
    """The same with a connection for each step."""

    KEPT = False


class sqlite_persist(_Sqlite):
    """SQLite with a rollback journal that is not deleted but overwritten."""

    JOURNAL = "persist"


class sqlite_wal(_Sqlite):
    """SQLite with a write-ahead log and its index in shared memory, the connection kept open."""

    JOURNAL = "wal"


class sqlite_wal_reopened(_Sqlite):
    """The same with a connection for each step: the log is deleted when it closes."""

    JOURNAL = "wal"
    KEPT = False


class dbm_dumb(Habit):
    """Python's own dbm: data are overwritten in place, an index is rewritten."""

    def begin(self):
        self.items = {}
        dbm.dumb.open(self.path("db"), "c").close()

    def step(self, n):
        key = f"key{n % 13}"
        with dbm.dumb.open(self.path("db"), "w") as db:
            db[key] = self.line(n)
            pause()
        self.items[key.encode()] = self.line(n).encode()

    def check(self, n):
        with dbm.dumb.open(self.path("db"), "r") as db:
            equal({key: db[key] for key in db.keys()}, self.items, "the items")


class lmdb_kept(Habit):
    """LMDB: a database that is mapped, kept open."""

    def begin(self):
        import lmdb

        self.items = {}
        self.env = lmdb.open(self.path("db"), map_size=4 << 20, sync=False)

    def step(self, n):
        key = f"{n % 50:04}".encode()
        with self.env.begin(write=True) as transaction:
            transaction.put(key, self.line(n).encode() * 3)
            pause()
        self.items[key] = self.line(n).encode() * 3

    def check(self, n):
        with self.env.begin() as transaction:
            equal(dict(transaction.cursor()), self.items, "the items")

    def end(self):
        self.env.close()
        os.unlink(self.path("db/lock.mdb"))


class lmdb_writemap(lmdb_kept):
    """LMDB that writes through its mapping."""

    def begin(self):
        import lmdb

        self.items = {}
        self.env = lmdb.open(self.path("db"), map_size=4 << 20, sync=False, writemap=True)


class lmdb_reopened(lmdb_kept):
    """LMDB that is opened for each step."""

    def begin(self):
        super().begin()
        self.env.close()

    def step(self, n):
        self.open()
        super().step(n)
        self.env.close()

    def check(self, n):
        self.open()
        super().check(n)
        self.env.close()

    def open(self):
        import lmdb

        self.env = lmdb.open(self.path("db"), map_size=4 << 20, sync=False)
