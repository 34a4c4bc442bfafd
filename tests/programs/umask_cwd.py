"""umask, working directory, limits, niceness, out-of-memory score, environment and a deleted directory."""

import os
import resource

from harness import await_go, child, equal, passed, reap, start, wait

start()
os.mkdir("below")
os.chdir("below")
cwd = os.getcwd()
os.umask(0o027)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (222, hard))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(5)
niceness = os.nice(0)
with open("/proc/self/oom_score_adj", "w") as f:
    f.write("333")
os.environ["CKPT_TEST"] = "kept"


def in_deleted_directory():
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    os.write(w, b"x")
    await_go()
    equal(os.listdir("."), [], "content of the deleted directory")
    equal(os.stat(".").st_nlink, 0, "links of the deleted directory")


r, w = os.pipe()
pid = child(in_deleted_directory)
os.read(r, 1)

wait()

equal(os.getcwd(), cwd, "working directory")
fd = os.open("new", os.O_WRONLY | os.O_CREAT, 0o777)
equal(os.fstat(fd).st_mode & 0o777, 0o750, "mode of a new file")
equal(resource.getrlimit(resource.RLIMIT_NOFILE), (222, hard), "limit of descriptors")
equal(resource.getrlimit(resource.RLIMIT_CORE), (0, 0), "limit of core files")
equal(os.nice(0), niceness, "niceness")
with open("/proc/self/oom_score_adj") as f:
    equal(f.read().strip(), "333", "out-of-memory score")
equal(os.environ["CKPT_TEST"], "kept", "environment")
reap(pid)
passed()
