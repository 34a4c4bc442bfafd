"""The same as mp_fork.py with the start method spawn."""

from mp_fork import main

if __name__ == "__main__":
    main("spawn")
