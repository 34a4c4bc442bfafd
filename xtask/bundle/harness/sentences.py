"""Whether each sentence about GPUs, in the pages that have modules in `pages`, is a claim or exempt by name.

A sentence is about GPUs if one of WORDS is in it, or if all of its section is. It has to contain the text of a claim,
or begin as an exemption does. A row of a table is read as one line with its cells joined, so that its first sentence
begins with the first cell. Of docs/simcuda.md, only first cells are read: the facts. What is added to a sentence that
has a claim already is not noticed. From the root: PYTHONPATH=xtask/bundle python3 -m harness.sentences
"""

import os
import re
import sys

from harness.pages import gpus, limits, resuming, simcuda

WORDS = re.compile(
    r"GPU|CUDA|NCCL|NVIDIA|NVML|CUPTI|NVLink|\bMIG\b|\bMPS\b|\bcu[A-Z]|\bnccl[A-Z]|\bdrivers?\b|interposer"
    r"|[Dd]evice memory|memory of the device|\bdevices\b.*\bcontexts?\b|kills a context|\bpools?\b|multicast object"
    r"|parked|the mirror|--mirror|ckpt-agent|ckpt-copy|^descriptors: "
)
# Ends of sentences; what closes a bracket or a mark of Markdown goes with them.
END = re.compile(r"(?<=[.!?])[)*\"`]*\s+")
RULE = re.compile(r"\|[-| ]+\|")
# Sections that are about GPUs as a whole; all of docs/gpus.md is.
SECTIONS = {
    limits.FILE: ["State on the GPU", "Slower than it could be"],
    resuming.FILE: ["On other GPUs"],
}


def rows(page):
    """Paragraphs, items and rows of tables, each with its section: a document has each of them on one line."""
    section, is_code, lines = "", False, page.splitlines()
    for line, following in zip(lines, lines[1:] + [""]):
        if line.startswith("```"):
            is_code = not is_code
        elif line.startswith("#"):
            section = line.lstrip("# ")
        elif line.strip() and not is_code and not RULE.fullmatch(line) and not RULE.fullmatch(following):
            yield section, line.strip()


def sentences(file, row):
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row[1:-1])] if row.startswith("|") else []
    if file == simcuda.FILE:
        return END.split(cells[0]) if cells else []
    return END.split(": ".join(cells) if cells else re.sub(r"^(-|\d+\.) ", "", row))


def of_gpus(file, page):
    """The sentences about GPUs of a page."""
    for section, row in rows(page):
        for sentence in sentences(file, row):
            is_whole = file in (gpus.FILE, simcuda.FILE) or section in SECTIONS.get(file, ())
            if is_whole or WORDS.search(sentence):
                yield sentence


def complaints(root):
    """Sentences that are neither a claim nor exempt, and exemptions of no sentence."""
    found = []
    for page in (gpus, limits, resuming, simcuda):
        with open(os.path.join(root, page.FILE), encoding="utf-8") as file:
            of_page = list(of_gpus(page.FILE, file.read()))
        texts = [claim.text for claim in page.CLAIMS]
        exempt = [text for several in page.EXEMPT.values() for text in several]
        for sentence in of_page:
            if not any(text in sentence for text in texts) and not sentence.startswith(tuple(exempt)):
                found.append(f"{page.FILE}: no claim and no exemption: {sentence}")
        for text in exempt:
            if not any(sentence.startswith(text) for sentence in of_page):
                found.append(f"{page.FILE}: no sentence begins as this exemption: {text}")
    return found


if __name__ == "__main__":
    wrong = complaints(sys.argv[1] if len(sys.argv) > 1 else ".")
    print("\n".join(wrong))
    sys.exit(bool(wrong))
