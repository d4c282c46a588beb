"""Forge bundles: the members of an honest one, changed, with hashes and figures computed anew."""

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.dataset.study import load_study
from harness.records import records
from harness.records.files import read_columns, write_columns
from harness.share import make_bundle, read_bundle
from harness.share.recomputed import figures_of

HONEST = Path(__file__).parent / "golden" / "bundle-1.tar.zst"
Members = dict[str, bytes]


def tar_of(path: Path) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(path.read_bytes()), "zstd") as stream:
        return bytes(stream.read())


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


class Forgery:
    """The members of an honest bundle. `cells` finds records by a part of their cell's id, in order."""

    def __init__(self, honest: Path = HONEST) -> None:
        self.members: Members = read_bundle.unpacked(honest)
        self.manifest: dict[str, Any] = json.loads(self.members["manifest.json"])
        self.claimed = [dict(each) for each in self.manifest["figures"]]

    def folders(self) -> list[str]:
        return [name.removesuffix("/record.json") for name in self.members if name.endswith("/record.json")]

    def of(self, part: str) -> list[str]:
        return [each for each in self.folders() if part in self.record(each)["cell"]]

    def record(self, folder: str) -> dict[str, Any]:
        return json.loads(self.members[f"{folder}/record.json"])

    def edit(self, folder: str, **changes: Any) -> None:
        """Replace parts of a record, as `machine__cpu="x"`."""
        record = self.record(folder)
        for path, value in changes.items():
            *parents, last = path.split("__")
            place = record
            for name in parents:
                place = place[name]
            place[last] = value(place.get(last)) if callable(value) else value
        self.members[f"{folder}/record.json"] = json.dumps(record, indent=1).encode()

    def columns(self, folder: str, table: str = "tokens") -> dict[str, list[Any]]:
        with tempfile.TemporaryDirectory() as at:
            (path := Path(at, "table")).write_bytes(self.members[f"{folder}/{table}.parquet"])
            return read_columns(path, ())

    def put(self, folder: str, columns: dict[str, Any], table: str = "tokens") -> None:
        with tempfile.TemporaryDirectory() as at:
            write_columns(path := Path(at, "table"), columns)
            self.members[f"{folder}/{table}.parquet"] = path.read_bytes()

    def series(self, folder: str, change: Callable[[Any], Any], stamps: bool = True) -> None:
        """Change the times of a series, and with `stamps` also the record's first and last stamp."""
        import numpy as np

        columns = self.columns(folder)
        changed = (
            np.asarray(change(np.array(columns["latency_ns"], dtype=float))).round().astype(int).tolist()
        )
        self.put(
            folder, {**{name: of[: len(changed)] for name, of in columns.items()}, "latency_ns": changed}
        )
        if stamps:
            self.edit(folder, timing__first_token_ns=changed[0], timing__last_token_ns=sum(changed))

    def copy(self, folder: str, **changes: Any) -> str:
        """One record more, a copy of this one."""
        new = f"records/{len(self.folders()) + 1:05}"
        for name in list(self.members):
            if name.startswith(f"{folder}/"):
                self.members[name.replace(folder, new)] = self.members[name]
        self.claimed.append(self.claimed[self.folders().index(folder)])
        self.edit(new, **changes)
        return new

    def write(self, path: Path, claims: bool = True, hashes: bool = True) -> Path:
        """The bundle, with hashes as they are now; with `claims` its figures too, each record with the status
        that it was claimed to have."""
        if claims:
            with tempfile.TemporaryDirectory() as at:
                for name, content in self.members.items():
                    (file := Path(at, name)).parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
                stored = list(records(Path(at), lambda damage: None))
                computed = figures_of(stored, load_study(stored))
            kept = [{n: v for n, v in each.items() if n in ("status", "verdict")} for each in self.claimed]
            self.manifest["figures"] = [new | old for new, old in zip(computed, kept, strict=False)]
            self.manifest["records"] = len(stored)
        if hashes:
            self.manifest["files"] = {
                name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
                for name, content in self.members.items()
                if name != "manifest.json"
            }
        self.members["manifest.json"] = json.dumps(self.manifest).encode()
        path.write_bytes(make_bundle.packed(self.members))
        return path


def with_member(info: tarfile.TarInfo, content: bytes = b"", honest: Path = HONEST) -> bytes:
    """The honest bundle with a member of any kind put in front of its end."""
    data = tar_of(honest)
    extra = io.BytesIO()
    info.size = len(content)
    with tarfile.open(fileobj=extra, mode="w") as tar:
        tar.addfile(info, io.BytesIO(content))
    used = extra.getvalue().rstrip(b"\0")
    used += bytes(-len(used) % tarfile.BLOCKSIZE)
    return zstd(data[:-1024] + used + data[-1024:])
