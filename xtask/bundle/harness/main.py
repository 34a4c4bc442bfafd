"""What run.sh runs: the stages in turn, each in a process of its own with a limit, then the summary."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from harness import machine, processes, records, summary
from harness.settings import CALLS, LIMITS_S, Settings

STAGES = list(LIMITS_S)
SHM = "/dev/shm"
# Instead of stages: only the summary, of results that are there.
SUMMARY = "summary"
# It may hang the machine: run only by its name, after all others.
LAST = "kill"
# Logs of a stage go into one file; the end of a long one tells why it failed.
MOST_LOG_BYTES = 1 << 20


def refuse(text):
    print(f"run.sh: {text}", file=sys.stderr)
    return 2


def main(words):
    if words[:1] == ["--stage"]:
        return run_stage(words[1], words[2])
    if any(word in ("-h", "--help") for word in words):
        print(f"usage: run.sh [STAGE…]\nstages: {' '.join(STAGES)}\nresults go into $OUT (./out); see README.md")
        print("calls of ten minutes at most:\n" + "\n".join(f"    run.sh {' '.join(stages)}" for stages in CALLS))
        return 0
    if words == [SUMMARY]:
        return summary.write(Settings("").out, STAGES, [])
    unknown = [word for word in words if word not in STAGES]
    if unknown:
        return refuse(f"there is no stage {unknown[0]!r}; the stages are {' '.join(STAGES)}")
    chosen = [stage for stage in STAGES if stage in words] or [stage for stage in STAGES if stage != LAST]
    try:
        settings = Settings("")
        os.makedirs(settings.out, exist_ok=True)
        work = tempfile.mkdtemp(prefix="ckpt-run-bundle-", dir=os.environ.get("BUNDLE_WORK"))
        # Of checks, which are killed with their stage. Its name is short: they have sockets there.
        shm = tempfile.mkdtemp(prefix="b-", dir=SHM if os.path.isdir(SHM) else None)
    except (ValueError, OSError) as error:
        return refuse(str(error))
    os.environ["CONFORMANCE_DIR"] = shm
    try:
        return run_all(chosen, work)
    finally:
        processes.end_all()
        machine.unmount(os.path.join(work, "fast"))
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def run_all(chosen, work):
    processes.adopt_orphans()
    settings = Settings(work)
    is_mounted = machine.mount_fast(settings.fast)
    facts = machine.look(settings)
    facts["is_quick"] = settings.is_quick
    facts["fast"] = "tmpfs" if is_mounted else "the disk of the work directory"
    with open(os.path.join(work, "facts.json"), "w") as file:
        json.dump(facts, file)
    summary.print_machine(facts)
    for stage in chosen:
        print(f"\n{stage} (at most {settings.limit_s(stage):.0f} s)", flush=True)
        result = run_limited(settings, stage)
        result["machine"] = facts
        write_json(os.path.join(settings.out, f"{stage}.json"), result)
        pack_logs(settings, stage)
    return summary.write(settings.out, STAGES, chosen)


def run_limited(settings, stage):
    """Runs a stage in a process that is ended at its limit."""
    logs = os.path.join(settings.work, "logs")
    shutil.rmtree(logs, ignore_errors=True)
    os.makedirs(logs)
    limit_s = settings.limit_s(stage)
    begun, started_unix_s = time.monotonic(), time.time()
    with open(os.path.join(logs, "stage.log"), "w") as errors:
        command = [sys.executable, "-I", "-B", os.path.abspath(__file__), "--stage", stage, settings.work]
        # In a session of its own: what ends it does not end us.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        below = processes.descendants(process.pid)
        process.kill()
        process.wait()
        for pid in below:
            processes.kill(pid)
        left = processes.end_all()
    steps = records.read(os.path.join(settings.work, f"{stage}.jsonl"))
    for step in steps:
        if step["outcome"] == "begun":
            how = f"the stage's limit of {limit_s:.0f} s was over" if code is None else f"the stage ended with {code}"
            step.update(outcome="fail", text=f"not done when {how}", values={})
            print(records.line(step["step"], "fail", step["text"], {}, 0), flush=True)
    if code == 0 and not steps and settings.only:
        text = f"no step has a name in which BUNDLE_ONLY={settings.only} is found"
        steps.append({"step": "stage", "outcome": "skip", "text": text, "values": {}})
        print(records.line("stage", "skip", text, {}, 0), flush=True)
    elif code not in (0, None) or not steps:
        text = f"the stage ended with {code}: see stage.log" if code is not None else "nothing was done in time"
        steps.append({"step": "stage", "outcome": "fail", "text": text, "values": {}})
    if left:
        steps.append({"step": "stage", "outcome": "fail", "text": f"processes are left: {left}", "values": {}})
    return {
        "stage": stage,
        "started_unix_s": round(started_unix_s),
        "took_s": round(time.monotonic() - begun, 1),
        "limit_s": limit_s,
        "timed_out": code is None,
        "steps": steps,
    }


def run_stage(stage, work):
    """In the stage's own process."""
    import importlib

    processes.adopt_orphans()
    with open(os.path.join(work, "facts.json")) as file:
        settings = Settings(work, json.load(file))
    lines = records.Records(os.path.join(work, f"{stage}.jsonl"), settings.limit_s(stage) - 5, settings.only)
    importlib.import_module(f"harness.stages.{stage}").run(settings, lines)
    return 0


def write_json(path, value):
    with open(path + ".part", "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    os.rename(path + ".part", path)


def pack_logs(settings, stage):
    """One file for all logs: so that a machine that gives few files back gives all."""
    logs = os.path.join(settings.work, "logs")
    with tarfile.open(os.path.join(settings.out, f"{stage}-logs.tar.gz"), "w:gz") as archive:
        for name in sorted(os.listdir(logs)):
            path = os.path.join(logs, name)
            if os.path.getsize(path) > MOST_LOG_BYTES:
                with open(path, "rb+") as file:
                    file.seek(-MOST_LOG_BYTES, os.SEEK_END)
                    end = file.read()
                    file.seek(0)
                    file.write(end)
                    file.truncate()
            archive.add(path, arcname=f"{stage}/{name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
