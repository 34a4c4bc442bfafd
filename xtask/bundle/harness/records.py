"""What a stage finds out, written down at once: whatever happens to it, what was measured until then is kept."""

import json
import os
import re
import time
import traceback


class Skip(Exception):
    """What a step needs is not here."""


class Fail(Exception):
    """A step found something wrong; what it has measured all the same is kept."""

    def __init__(self, text, values=None):
        super().__init__(text)
        self.values = values or {}


class Records:
    """The lines of one stage: a JSON object for each step, first when it begins and then when it ends."""

    def __init__(self, path, limit_s, only=None):
        self.file = open(path, "a", buffering=1)
        self.only = only
        self.deadline = time.monotonic() + limit_s

    def left_s(self):
        """Seconds until the stage is ended."""
        return self.deadline - time.monotonic()

    def write(self, **record):
        self.file.write(json.dumps(record) + "\n")

    def step(self, name, body, *args, needs_s=0):
        """Runs one step; gives what it gave, or None if it failed or was skipped. `needs_s`: the seconds below which
        it is not begun."""
        if self.only and not re.search(self.only, name):
            return None
        if self.left_s() < needs_s:
            self.end(name, "skip", f"no time: it takes about {needs_s:.0f} s, {self.left_s():.0f} s are left", {}, 0)
            return None
        self.write(step=name, outcome="begun")
        begun = time.monotonic()
        values, text = None, ""
        try:
            values = body(*args) or {}
            outcome = "pass"
        except Skip as why:
            outcome, text = "skip", str(why)
        except Fail as why:
            outcome, text, values = "fail", str(why), why.values
        except Exception as error:
            outcome, text = "fail", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self.end(name, outcome, text, values or {}, time.monotonic() - begun)
        return values

    def end(self, name, outcome, text, values, took_s):
        self.write(step=name, outcome=outcome, text=text, values=values, took_s=round(took_s, 3))
        print(line(name, outcome, text, values, took_s), flush=True)


def line(name, outcome, text, values, took_s):
    """One step for people."""
    shown = ", ".join(f"{key} {short(value)}" for key, value in values.items() if is_short(value))
    words = "; ".join(filter(None, [text.strip().replace("\n", " | "), shown]))
    mark = {"pass": "ok", "skip": "SKIPPED", "fail": "FAILED"}.get(outcome, outcome)
    return f"  {mark:<8}{name:<34}{took_s:7.1f} s  {words}"


def is_short(value):
    return isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) < 60)


def short(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read(path):
    """The steps of a stage that has ended, however: one that did not end is a failure."""
    steps = []
    if not os.path.exists(path):
        return steps
    for text in open(path):
        try:
            record = json.loads(text)
        except ValueError:
            continue  # the stage was killed in the middle of a line
        if record["outcome"] != "begun" and steps and steps[-1]["outcome"] == "begun":
            steps.pop()
        steps.append(record)
    return steps
