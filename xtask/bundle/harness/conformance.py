"""The conformance suite, an area at a time, so that what is done is kept."""

import json
import os

from harness import processes
from harness.records import Fail
from harness.stages.common import need

# For one area, seconds.
LIMIT_S = 150
# For one check: several of an area may hang and be told. Not where the bundle itself is tried: that machine
# may be slow.
CHECK_LIMIT = {"CONFORMANCE_LIMIT_S": "30"}
# What the interposer does otherwise, and answers that it does not change: as simulator/conformance/tests/suite.rs has them.
OTHERWISE_INTERPOSED = {"fault/sticky", "vmm/released-handle"}
SAME_ANSWERS = {"question/attributes", "question/memory-info", "question/ipc-interior"}


def areas(settings):
    said = processes.ok([settings.at("bin/conformance"), "--list"], 20)
    found = []
    for line in said.splitlines():
        area = line.split("/")[0] + "/"
        if area not in found:
            found.append(area)
    return found


def outcomes(settings, area, label="plain", **env):
    """Runs an area; the outcome and the text of each check."""
    need(settings, "driver")
    kept = os.path.join(settings.work, f"conformance-{label}-{area.strip('/')}.json")
    if not os.path.exists(kept):
        argv = [settings.at("bin/conformance"), "--lib", settings.facts["libcuda"], "--json", kept]
        nccl = (settings.facts.get("torch") or {}).get("nccl_path")
        argv += ["--nccl", nccl] if nccl else []
        log = os.path.join(settings.work, "logs", f"conformance-{label}-{area.strip('/')}.txt")
        limit = {} if settings.is_quick else CHECK_LIMIT
        code, said = processes.run([*argv, area], LIMIT_S, log=log, env=settings.env(**limit, **env))
        if code not in (0, 1):
            raise Fail(f"the suite ended with {code}: {processes.tail(said)}")
    with open(kept) as file:
        checks = json.load(file)["checks"]
    return {check["name"]: (check["outcome"], check.get("text", "")) for check in checks}


def area(settings, name):
    """One area; fails if a check of it does."""
    found = outcomes(settings, name)
    wrong = [f"{check}: {text}" for check, (outcome, text) in found.items() if outcome == "fail"]
    values = {"checks": len(found)}
    for outcome in ("pass", "fail", "skipped", "answer"):
        count = sum(1 for one, _ in found.values() if one == outcome)
        if count:
            values[outcome] = count
    for outcome in ("answer", "skipped", "fail"):
        texts = {check: text for check, (one, text) in found.items() if one == outcome}
        if texts:
            values[f"{outcome}_texts"] = texts
    if wrong:
        raise Fail("; ".join(wrong), values)
    return values


def interposed_is_plain(settings, name):
    """An area with and without the interposer: the same outcomes, but where it is known to do otherwise."""
    plain = outcomes(settings, name)
    nobody = os.path.join(settings.work, "nobody")
    inside = outcomes(
        settings, name, "interposed", LD_PRELOAD=settings.interposer, CKPT_AGENT_SOCKET=nobody
    )
    different = []
    for check, (outcome, text) in plain.items():
        # Sharing between processes needs a launcher.
        if check.startswith("ipc/") or check == "checkpoint/ipc" or check in OTHERWISE_INTERPOSED:
            continue
        other, other_text = inside.get(check, ("not run", ""))
        if other != outcome or (check in SAME_ANSWERS and text != other_text):
            different.append(f"{check}: plain {outcome} {text}; interposed {other} {other_text}")
    if different:
        raise Fail("; ".join(different))
    return {"checks": len(plain)}
