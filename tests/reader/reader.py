"""An independent reader of stores, written from docs/format.md alone.

    reader.py STORE [--key FILE] [--job KEY] [--extract DIR]

Lists the snapshots of each job, verifies all of each, and prints one JSON object. With --extract the data files are
written below DIR/KEY/ID/. Exit code 1 if anything is damaged. Needs Python's blake3, zstandard and cryptography.
"""

import argparse
import json
import re
import struct
import sys
from pathlib import Path

import blake3
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK_MAX = 4 << 20
ZEROES = bytes(32)
KEY_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
ID_NAME = re.compile(r"(\d{6,})-\d{8}T\d{6}Z")


class Damage(Exception):
    pass


def need(condition, what):
    if not condition:
        raise Damage(what)


class Secrets:
    """What the key gives; without one, plain hashes."""

    def __init__(self, key):
        self.key = key
        self.number = 0
        if key:
            self.number = struct.unpack("<Q", self.derive("number of the key")[:8])[0] or 1
            self.names = self.derive("names of chunks")
            self.records = self.derive("checksums of records")

    def derive(self, what, more=b""):
        return blake3.blake3(self.key + more, derive_key_context="ckpt-run store 2: " + what).digest()

    def name(self, content):
        return blake3.blake3(content, key=self.names).digest() if self.key else blake3.blake3(content).digest()

    def code(self, name, body):
        """The code of the record `name` of a job."""
        context = "ckpt-run store 3: lines of a file of a job"
        key = blake3.blake3(self.key + name.encode(), derive_key_context=context).digest()
        return blake3.blake3(body, key=key).hexdigest().encode()

    def checksum(self, record):
        return blake3.blake3(record, key=self.records).digest() if self.key else blake3.blake3(record).digest()

    def check_number(self, number):
        need(number == self.number, "it needs another key, or none")

    def open_chunk(self, pack, offset, encoding, raw_bytes, stored):
        cipher = AESGCM(self.derive("chunks of a pack", pack))
        return cipher.decrypt(struct.pack("<QI", offset, 0), stored, struct.pack("<BQ", encoding, raw_bytes))

    def open_body(self, snapshot, body):
        cipher = AESGCM(self.derive("content of a record", body[:16]))
        return cipher.decrypt(bytes(12), body[16:], snapshot.encode())


def read_key(path):
    content = Path(path).read_bytes()
    return content if len(content) == 32 else bytes.fromhex(content.decode().strip())


def inflate(frame, raw_bytes):
    need(zstandard.frame_content_size(frame) in (-1, raw_bytes), "a frame of the wrong length")
    content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=raw_bytes)
    need(len(content) == raw_bytes, "a frame of the wrong length")
    return content


def undo(encoding, stored, raw_bytes):
    if encoding == 0:
        return stored
    if encoding == 1:
        return inflate(stored, raw_bytes)
    width = {2: 2, 3: 4}[encoding]
    lengths = struct.unpack_from(f"<{width}I", stored)
    at, content = 4 * width, bytearray(raw_bytes)
    for index, length in enumerate(lengths):
        plane_bytes = (raw_bytes + width - 1 - index) // width
        plane = stored[at : at + length]
        content[index::width] = plane if length == plane_bytes else inflate(plane, plane_bytes)
        at += length
    need(at == len(stored), "something behind the planes")
    return bytes(content)


def read_index(path, secrets):
    """The chunks of a pack: name to (offset, stored bytes, raw bytes, encoding)."""
    data = path.read_bytes()
    need(len(data) >= 88 and data[:8] == b"CKPTINDX", "not an index")
    version, zero, pack, number, pack_bytes, count = struct.unpack_from("<II16sQQQ", data, 8)
    need(version == 1 and zero == 0, f"version {version}")
    secrets.check_number(number)
    need(secrets.checksum(data[:-32]) == data[-32:], "checksum")
    need(pack.hex() == path.stem, "the index of another pack")
    need(len(data) == 88 + 56 * count, "length")
    chunks, end = {}, 64
    for at in range(56, 56 + 56 * count, 56):
        name, offset, stored_bytes, raw_bytes, encoding, zeroes = struct.unpack_from("<32sQIIB7s", data, at)
        need(encoding & 0x7F <= 3 and zeroes == bytes(7), "an entry that is not known")
        need((encoding >= 0x80) == (number != 0), "an entry that is not encrypted as the pack is")
        need(1 <= raw_bytes <= CHUNK_MAX, "a chunk's length")
        need(1 <= stored_bytes <= raw_bytes + (16 if number else 0), "a chunk's length")
        need(offset >= end, "entries overlap")
        end = offset + stored_bytes
        chunks[name] = (offset, stored_bytes, raw_bytes, encoding)
    need(end <= pack_bytes, "an entry outside")
    need(path.with_suffix(".pack").stat().st_size == pack_bytes, "the pack has another length")
    return pack, chunks


class Packs:
    def __init__(self, job, secrets):
        self.secrets = secrets
        self.where = {}
        for path in sorted((job / "packs").glob("*.index")):
            if re.fullmatch(r"[0-9a-f]{32}", path.stem):
                pack, chunks = read_index(path, secrets)
                for name, place in chunks.items():
                    self.where.setdefault(name, []).append((path.with_suffix(".pack"), pack, *place))

    def chunk(self, name, raw_bytes):
        if name == ZEROES:
            return bytes(raw_bytes)
        need(name in self.where, "a chunk that is in no pack")
        path, pack, offset, stored_bytes, listed_bytes, encoding = self.where[name][0]
        need(listed_bytes == raw_bytes, "a chunk of another length")
        with path.open("rb") as file:
            file.seek(offset)
            stored = file.read(stored_bytes)
        if encoding >= 0x80:
            stored = self.secrets.open_chunk(pack, offset, encoding, raw_bytes, stored)
        content = undo(encoding & 0x7F, stored, raw_bytes)
        need(len(content) == raw_bytes and self.secrets.name(content) == name, "a chunk was altered")
        return content


def check_path(path):
    need(path and "\0" not in path, f"path {path!r}")
    need(all(part not in ("", ".", "..") for part in path.split("/")), f"path {path!r}")


def check_json(snapshot, body):
    need(body["version"] <= 3, "a newer manifest")
    for file in body["files"]:
        check_path(file["path"])
    for file in body["shm_files"] + body["spare_files"]:
        check_path(file["data"])
    for process in body.get("gpu", []):
        check_path(process["report"])
        if process["memory"] is not None:
            check_path(process["memory"])
    need(body["id"] == snapshot, "another snapshot's manifest")


def packed_manifest(path, secrets):
    """The JSON, and for each data file its chunks as (name, length)."""
    data = path.read_bytes()
    need(len(data) >= 64 and data[:8] == b"CKPTSNAP", "not a manifest")
    version, zero, number, body_bytes = struct.unpack_from("<IIQQ", data, 8)
    need(version == 1 and zero == 0, f"version {version}")
    secrets.check_number(number)
    need(secrets.checksum(data[:-32]) == data[-32:], "checksum")
    need(len(data) == 64 + body_bytes, "length")
    body = data[32:-32]
    if number:
        body = secrets.open_body(path.name, body)
    (json_bytes,) = struct.unpack_from("<Q", body)
    need(8 + json_bytes <= len(body), "length of the JSON")
    manifest = json.loads(body[8 : 8 + json_bytes])
    check_json(path.name, manifest)
    at, table = 8 + json_bytes, []
    for file in manifest["files"]:
        (count,) = struct.unpack_from("<I", body, at)
        rows = [struct.unpack_from("<32sI", body, at + 4 + 36 * row) for row in range(count)]
        at += 4 + 36 * count
        need(all(1 <= length <= CHUNK_MAX for _, length in rows), "a chunk's length")
        need(sum(length for _, length in rows) == file["bytes"], "a data file is not as long as its chunks")
        table.append(rows)
    need(at == len(body), "something behind the table")
    return manifest, table


def checked_body(text):
    """The text of BODY in {"checksum":...,"body":BODY}."""
    match = re.fullmatch(rb'\{"checksum":"([0-9a-f]{64})","body":(.*)\}', text, re.DOTALL)
    need(match, "not a record with a checksum")
    need(blake3.blake3(match[2]).hexdigest().encode() == match[1], "checksum")
    return match[2]


def checked_json(text):
    return json.loads(checked_body(text))


def authentic_json(text, name, secrets):
    """The body of a record with a code of the key."""
    start = rb'\{"version":2,"key":"([0-9a-f]{16})","code":"([0-9a-f]{64})",(.*)'
    match = re.fullmatch(start, checked_body(text), re.DOTALL)
    need(match, f"{name} has no code of the key")
    need(int(match[1], 16) == secrets.number, f"{name} was written with another key")
    body = b'{"version":1,' + match[3]
    need(secrets.code(name, body) == match[2], f"the code of {name}")
    return json.loads(body)


def packed_contents(path, packs, secrets):
    manifest, table = packed_manifest(path, secrets)
    for file, rows in zip(manifest["files"], table):
        yield file, b"".join(packs.chunk(name, length) for name, length in rows)


def plain_contents(path):
    manifest = checked_json((path / "manifest.json").read_bytes())
    check_json(path.name, manifest)
    for file in manifest["files"]:
        content = (path / file["path"]).read_bytes()
        need(len(content) == file["bytes"], f"{file['path']}: length")
        need(blake3.blake3(content).hexdigest() == file["blake3"], f"{file['path']}: checksum")
        yield file, content


def read_snapshot(contents, into):
    files = {}
    for file, content in contents:
        files[file["path"]] = {"bytes": len(content), "blake3": blake3.blake3(content).hexdigest()}
        if into:
            place = into / file["path"]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    return files


def read_job_record(path, job, secrets):
    text = path.read_bytes()
    if secrets.key:
        return authentic_json(text, f"{job.name}/{path.relative_to(job)}", secrets)
    record = checked_json(text) if text.startswith(b'{"checksum":') else json.loads(text)
    need(record["version"] == 1, f"version {record['version']}")
    return record


def snapshots_of(job):
    found = {}
    for path in (job / "snapshots").glob("*"):
        if ID_NAME.fullmatch(path.name) and (path / "manifest.json").is_file() and not path.is_symlink():
            found[path.name] = path
    for path in (job / "manifests").glob("*"):
        if ID_NAME.fullmatch(path.name):
            found[path.name] = path
    return sorted(found.values(), key=lambda path: int(path.name.split("-")[0]))


def record_of(job):
    """The job's record: the object with the highest number, or the one of versions 1 and 2."""
    numbers = [int(path.stem) for path in (job / "job").glob("*.json") if re.fullmatch("[1-9][0-9]*", path.stem)]
    return job / "job" / f"{max(numbers)}.json" if numbers else job / "job.json"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--key")
    parser.add_argument("--extract", type=Path)
    args = parser.parse_args()
    secrets = Secrets(read_key(args.key) if args.key else None)
    store = json.loads((args.store / "store.json").read_bytes())
    need(store["format"] == "ckpt-run store" and store["version"] in (1, 2, 3), "not a store that is known")
    jobs, damaged = {}, False
    for job in sorted((args.store / "jobs").iterdir()):
        record = record_of(job)
        if not KEY_NAME.fullmatch(job.name) or not record.is_file():
            continue
        packs = Packs(job, secrets)
        snapshots = {}
        for path in snapshots_of(job):
            contents = plain_contents(path) if path.is_dir() else packed_contents(path, packs, secrets)
            into = args.extract / job.name / path.name if args.extract else None
            try:
                snapshots[path.name] = read_snapshot(contents, into)
            except Exception as error:  # whatever damage does to a parser
                damaged = True
                snapshots[path.name] = {"damage": f"{type(error).__name__}: {error}"}
        jobs[job.name] = {"run": read_job_record(record, job, secrets)["run"], "snapshots": snapshots}
    print(json.dumps({"version": store["version"], "jobs": jobs}))
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
