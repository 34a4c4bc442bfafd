"""Writes files in one or several ways, and checks at each step that they are what the memory says.

usage: habits.py [--outside DIR] --prepare HABIT...
       habits.py [--outside DIR] --steps N HABIT...
       habits.py [--outside DIR] --slow-while FILE HABIT...
       habits.py --list

Each habit works in a directory of its name in the working directory, or below DIR if it is about files outside.
`--prepare` makes the files that exist before the job starts. With `--slow-while`, a step takes 10 ms or more as long
as FILE exists. The job ends some steps after FILE is gone, and its last line is `steps N`.

Exit code 0: the files are right. 1: they contradict the memory, stderr has the habit and the step. 77: a library
is missing.
"""

import argparse
import os
import sys
import time
import traceback

import databases
import in_place
import logs
import replaced
import training
import trees
from habit import UNAVAILABLE, Habit, pause, set_slow_while

# The shortest time of a slow step.
STEP_S = 0.01
# Steps after the job was told to end: with files that a resume has put back.
LAST_STEPS = 15


def all_habits():
    found = {}
    for module in (logs, in_place, replaced, trees, databases, training):
        for value in vars(module).values():
            is_habit = isinstance(value, type) and issubclass(value, Habit)
            if is_habit and value.__module__ == module.__name__ and not value.__name__.startswith("_"):
                found[value.__name__] = value
    return found


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--outside", default="../outside")
    parser.add_argument("--slow-while")
    parser.add_argument("habits", nargs="*")
    return parser.parse_args()


def main():
    args = arguments()
    every = all_habits()
    if args.list:
        print("\n".join(every))
        return
    set_slow_while(args.slow_while)
    habits = []
    for name in args.habits:
        parent = args.outside if every[name].__name__.startswith("outside_") else "."
        habits.append(every[name](os.path.join(parent, name)))
    habits.sort(key=lambda habit: not habit.forks)
    run(habits, args)


def run(habits, args):
    now, n = None, 0
    try:
        for now in habits:
            if args.prepare:
                os.makedirs(now.dir)
                now.prepare()
            else:
                now.begin()
        if args.prepare:
            return
        print("begun", flush=True)
        while n != args.steps:
            begun = time.monotonic()
            for now in habits:
                now.check(n)
                now.step(n)
                pause()
            n += 1
            if args.slow_while and args.steps is None:
                if os.path.exists(args.slow_while):
                    time.sleep(max(0, begun + STEP_S - time.monotonic()))
                else:
                    args.steps = n + LAST_STEPS
        for now in habits:
            now.check(n)
            now.end()
    except ImportError as error:
        print(f"not available: {error}", file=sys.stderr, flush=True)
        sys.exit(UNAVAILABLE)
    except BaseException as error:
        traceback.print_exc()
        print(f"fail: {now.name}: step {n}: {error}", file=sys.stderr, flush=True)
        # Workers of other habits end when the pipes to them are closed.
        os._exit(1)
    print(f"steps {n}", flush=True)


if __name__ == "__main__":
    main()
