"""The table at the end."""

import json
import os

from harness import claims

GIGA = 1e9
# The most important first.
VERDICTS = ["contradicted", "shown", "not run"]
# Each is a ratio or a time of one run, where it is found, and what it should be.
GOALS = [
    ("capture / plain pinned copy", "capture_ratio", ">=", 0.95),
    ("copy back / plain pinned copy", "copyback_ratio", ">=", 0.95),
    ("stall / CRIU with plain driver checkpoint", "stall_ratio", "<=", 0.1),
    ("stall beyond the copy's own time, s", "stall_beyond_copy_s", "<=", 2.0),
    ("resume / CRIU with plain driver checkpoint", "resume_ratio", "<=", 1 / 3),
    ("training slowed between checkpoints", "step_slowdown", "<=", 0.002),
    ("bit-equal losses after a resume", "is_bit_equal", "==", True),
]


def print_machine(facts):
    driver, torch, criu = facts.get("driver"), facts.get("torch"), facts["criu"]
    lines = [
        f"{facts['os']}, Linux {facts['kernel']}, glibc {facts['glibc']}, {facts['cpus']} CPUs ({facts['cpu']})",
        f"memory {facts['memory_bytes'] / GIGA:.0f} GB ({facts['available_bytes'] / GIGA:.0f} available), "
        f"disk {facts['disk_free_bytes'] / GIGA:.0f} GB free, stores and images on {facts['fast']}",
        f"GPU: {facts['nvidia_smi']}",
        f"driver: {driver or facts.get('driver_error') or 'none was found'} ({facts['libcuda']})",
        f"torch: {torch or facts.get('torch_error')}",
        f"criu: {criu['version']}, " + ("works" if criu["works"] else f"DOES NOT WORK: {criu.get('why_not')}"),
    ]
    print("\n".join(lines), flush=True)


def judge(results):
    """The goals that something was measured for: the worst value of each stays, the places told."""
    judged = []
    for text, name, relation, goal in GOALS:
        found = [
            (step["values"][name], f"{stage}: {step['step']}")
            for stage, result in results.items()
            for step in result["steps"]
            if name in step.get("values", {})
        ]
        for value, where in found:
            met = {">=": value >= goal, "<=": value <= goal, "==": value == goal}[relation]
            judged.append({"goal": text, "value": value, "wanted": f"{relation} {goal:.4g}", "met": met, "at": where})
    return judged


def write(out, stages, chosen):
    """Writes summary.json and summary.txt of all stages whose results are in `out`; the exit code is that of those
    that were run now."""
    results = {}
    for stage in stages:
        path = os.path.join(out, f"{stage}.json")
        if os.path.exists(path):
            with open(path) as file:
                results[stage] = json.load(file)
    lines, counts = [], {}
    for stage, result in results.items():
        now = "" if stage in chosen else "  (of an earlier run)"
        by = {"pass": 0, "fail": 0, "skip": 0}
        for step in result["steps"]:
            by[step["outcome"]] += 1
        counts[stage] = by
        lines.append(
            f"{stage:<10}{by['pass']:4} ok{by['fail']:4} failed{by['skip']:4} skipped{result['took_s']:8.1f} s{now}"
        )
        for outcome, word in (("fail", "FAILED"), ("skip", "SKIPPED")):
            for step in result["steps"]:
                if step["outcome"] == outcome:
                    lines.append(f"    {word:<8}{step['step']}: {step['text'][:300]}")
    goals = judge(results)
    lines += ["", "Goals (ratios of one run; nothing fails by a goal that is missed)"]
    if not is_of_a_gpu(results):
        lines.append("    These were not measured on a GPU, or with small sizes: they say nothing.")
    for goal in goals:
        mark = "met" if goal["met"] else "MISSED"
        lines.append(f"    {mark:<8}{goal['goal']:<44}{number(goal['value'])}  wanted {goal['wanted']}  ({goal['at']})")
    if not goals:
        lines.append("    nothing was measured for them")
    judged = claims.judge(results)
    lines += ["", "Claims of README.md and docs/"]
    if not is_of_a_gpu(results):
        lines.append("    These say nothing of a GPU.")
    for claim in sorted(judged, key=lambda claim: VERDICTS.index(claim["verdict"])):
        place = f"{claim['file']}: {claim['claim']}"
        lines.append(f"    {claim['verdict']:<14}{place}  ({claim['by'][:300]})")
    failed = sum(counts[stage]["fail"] for stage in chosen or counts if stage in counts)
    lines += ["", f"{failed} failed" if failed else "nothing failed"]
    text = "\n".join(lines)
    print("\nSummary\n" + text, flush=True)
    with open(os.path.join(out, "summary.txt"), "w") as file:
        file.write(text + "\n")
    with open(os.path.join(out, "summary.json"), "w") as file:
        some = next(iter(results.values()), {})
        value = {"machine": some.get("machine"), "ran_now": chosen, "stages": counts, "goals": goals}
        value["failed"] = failed
        value["is_of_a_gpu"] = is_of_a_gpu(results)
        value["claims"] = judged
        value["steps"] = {stage: result["steps"] for stage, result in results.items()}
        json.dump(value, file, indent=1)
        file.write("\n")
    return 1 if failed else 0


def is_of_a_gpu(results):
    """Whether the goals can be judged by what was measured."""
    machines = [result["machine"] for result in results.values()]
    on_gpu = all("SimCUDA" not in (one.get("driver") or {}).get("device", "SimCUDA") for one in machines)
    return bool(machines) and on_gpu and not any(one.get("is_quick") for one in machines)


def number(value):
    return str(value) if isinstance(value, bool) else f"{value:.4g}"
