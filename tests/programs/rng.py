"""Random generators: Python's goes on where it was, the kernel's gives new bytes; hashes stay."""

import os
import random
import secrets

from harness import check, equal, passed, start, wait

start()
random.seed(20240607)
for _ in range(1000):
    random.random()
state = random.getstate()
own = random.SystemRandom()
drawn = {os.urandom(16), secrets.token_bytes(16)}
texts = {f"text {n}": hash(f"text {n}") for n in range(100)}
marker = object()
identity = id(marker)

wait()

equal(random.getstate(), state, "state of the generator")
numbers = [random.random() for _ in range(10)]
again = random.Random(20240607)
for _ in range(1000):
    again.random()
equal(numbers, [again.random() for _ in range(10)], "numbers drawn afterwards")
drawn |= {os.urandom(16), secrets.token_bytes(16), own.randbytes(16)}
equal(len(drawn), 5, "different random bytes from the kernel")
check(all(hash(text) == value for text, value in texts.items()), "hashes have changed")
equal(id(marker), identity, "identity of an object")
passed()
