"""Asking a program that runs, by files in its working directory (programs/ask.h)."""

import os

from harness import processes


class Asked:
    """A program with a working directory. `wrong` says why it is of no use to wait for it any longer."""

    def __init__(self, directory):
        self.directory = directory

    def wrong(self):
        return None

    def path(self, name):
        return os.path.join(self.directory, name)

    def forget(self):
        """Takes back what was asked of a program that has died since."""
        for name in ("ask", "answer"):
            if os.path.exists(self.path(name)):
                os.unlink(self.path(name))

    def put(self, words):
        with open(self.path("ask.part"), "w") as file:
            file.write(words + "\n")
        os.rename(self.path("ask.part"), self.path("ask"))

    def take(self, what, limit_s):
        answer = self.path("answer")
        processes.until(f"the answer to {what}", lambda: os.path.exists(answer), limit_s, self.wrong)
        with open(answer) as file:
            text = file.read()
        os.unlink(answer)
        return text

    def ask(self, words, limit_s=60):
        self.put(words)
        return self.take(words, limit_s)

    def gap_s(self):
        """How long it has stood still, at the longest, since this was asked before."""
        return float(self.ask("gap"))

    def until_lines(self, name, count, limit_s=60):
        """Waits until a file in the directory has so many lines; gives how many it has."""
        return processes.until(
            f"{count} lines of {name}",
            lambda: self.lines(name) if self.lines(name) >= count else None,
            limit_s,
            self.wrong,
        )

    def lines(self, name):
        try:
            with open(self.path(name), "rb") as file:
                return file.read().count(b"\n")
        except FileNotFoundError:
            return 0
