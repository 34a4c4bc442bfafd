"""subprocess.Popen of `cat` with data in flight: all comes out afterwards, then it ends with 0."""

import subprocess

from harness import equal, passed, read_exactly, start, wait

start()
cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
lines = b"".join(b"line %d\n" % n for n in range(3000))
cat.stdin.write(lines)
first = read_exactly(cat.stdout.fileno(), 1000)

wait()

cat.stdin.write(b"later\n")
cat.stdin.close()
rest = b""
while part := cat.stdout.read(1 << 16):
    rest += part
equal(first + rest == lines + b"later\n", True, "all that went through cat came out")
equal(cat.wait(20), 0, "exit code of cat")
ended = subprocess.run(["sh", "-c", "echo new; exit 3"], stdout=subprocess.PIPE)
equal((ended.stdout, ended.returncode), (b"new\n", 3), "a new subprocess")
passed()
