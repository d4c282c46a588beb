"""Results as one file without what identifies a person."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, cast

import harness
from harness import records
from harness.analysis import agreement
from harness.analysis.columns import Repeat
from harness.base import bounds
from harness.base.files import FAULTS, open_regular, read_regular, strict_json, sync_folder
from harness.base.text import redacted, shortened
from harness.dataset import table as dataset_table
from harness.dataset.study import Study, load_study
from harness.records import ResultsError, Stored, files
from harness.records.files import read_columns, write_columns
from harness.records.kinds import KINDS, Record, wrong_with
from harness.records.parts import OUTCOMES
from harness.stacks.header import stacks

# Records without what identifies a person: names, paths, addresses, serial numbers and UUIDs. Pure.
#
# What has a form is found by its form, wherever it stands: paths, e-mail and MAC addresses, UUIDs, labelled
# serial numbers. Names have none, so they are given, or learned from home folders and addresses in the
# record.


REMOVED, PATH = "(removed)", "(path)"
LEAST_GIVEN, LEAST_LEARNED = 2, 3  # characters of a name: a shorter one may be any word
MOST_NAME = 64  # characters of the longest name of a host, and of an address before its @ (RFC 5321)
# Names that many machines share, and words that records are made of.
_COMMON = {
    *(
        "root",
        "user",
        "users",
        "admin",
        "ubuntu",
        "debian",
        "fedora",
        "runner",
        "test",
        "nobody",
        "localhost",
    ),
    *(
        "git",
        "harness",
        "home",
        "cpu",
        "cuda",
        "gpu",
        "metal",
        "vulkan",
        "hip",
        "decode",
        "none",
        "null",
        "synthetic",
    ),
}
_DROPPED = re.compile(
    r"(?:host|user|login|full)_?names?|user|host|log(?:in|_tail)|(?:.*_)?serial(?:_?(?:number|no))?"
    r"|mac(?:_?address(?:es)?)?|machine_?id|e?mail|ip(?:_?address(?:es)?)?|home",
    re.IGNORECASE,
)
_UUID = re.compile(
    r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])", re.IGNORECASE
)
_MAC = re.compile(r"(?<![\w:-])[0-9a-f]{2}([:-])[0-9a-f]{2}(?:\1[0-9a-f]{2}){4}(?![\w:-])", re.IGNORECASE)
# No expression may take more than linear time: a verifier applies them to a stranger's text.
_SERIAL = re.compile(
    r"(?<!\w)(?:serial(?:[ _-]?(?:number|no\.?))?|s/n)\s{0,3}[:=#]?\s{0,3}(?=[\w-]{0,40}\d)([\w-]{4,})",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<!\w)(?:host|user|login)[ _-]?name\s{0,3}[:=]\s{0,3}([\w.-]+)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\w.+-])([\w.+-]+)@([\w-][\w.-]*)")
_FILE_URL = re.compile(r"file:/{0,2}(?=/)")
_HOME = re.compile(r"/(?:home|Users)/([^\s/'\"<>|;,:()\[\]{}]+)")
# A path in the middle of a word, as in -I/home/me/include, is found by the folders that hold homes.
_IN_HOME = re.compile(r"/(?:home|Users|root)/[^\s'\"<>|;,:()\[\]{}]*")
_ANY_PATH = re.compile(r"(?<![\w./~-])(?:~[\w.-]*)?(?:/[^\s/'\"<>|:;,()\[\]{}`*?=]+)+/?")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\[^\s'\"<>|;,]*")
MOST_PASSES = 8
_BEGIN = re.compile(r"(?<![^\W_])\S")  # of a name: no letter or digit before it
_IDENTIFIER = re.compile(r"\w+")


class Anonymizer:
    """Takes the given names, and those learned from records, out of texts."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._lengths: dict[str, list[int]] = {}  # of the names that begin so, the longest first
        for name in names:
            self._add(name.strip(), LEAST_GIVEN)

    def learn(self, record: Any) -> None:
        """Learn the names of home folders, of user@host, and labelled ones."""
        for text in _texts(record):
            for pattern in (_HOME, _SERIAL, _NAMED, _ADDRESS):
                for match in pattern.finditer(text):
                    for word in match.groups():
                        if "." not in word:
                            self._add(word, LEAST_LEARNED)

    def _add(self, word: str, least: int) -> None:
        if least <= len(word) <= MOST_NAME and (name := _folded(word)) not in self._names and _is_name(name):
            self._names.add(name)
            lengths = self._lengths.setdefault(name[:LEAST_GIVEN], [])
            if len(name) not in lengths:
                lengths.append(len(name))
                lengths.sort(reverse=True)

    def value(self, value: Any) -> Any:
        """A copy of parsed JSON without data that identify a person. Keys such as `host_name` are
        removed with their values, in the stack's log too. Raises ValueError for too deep nesting."""
        return self._value(value, 0)

    def _value(self, value: Any, depth: int) -> Any:
        if depth > bounds.BUNDLE_DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(each, depth + 1) for each in value]
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if not _DROPPED.fullmatch(key)}
            return {
                key if _IDENTIFIER.fullmatch(key) else self.text(key): self._value(each, depth + 1)
                for key, each in kept.items()
            }
        return value

    def text(self, text: str) -> str:
        """The text without such data. A second call changes nothing, of another too: what is taken out may
        leave a path that begins there, as in x~NAME/y."""
        for _ in range(MOST_PASSES):
            if (left := self._pass(text)) == text:
                break
            text = left
        return text

    def _pass(self, text: str) -> str:
        if text.startswith(("/", "~/")) and "\n" not in text and ":" not in text:
            text = _last(text)  # a path as a whole, also one with spaces
        text = _UUID.sub(_hashed, redacted(text))
        for pattern in (_MAC, _SERIAL, _NAMED, _ADDRESS):
            text = pattern.sub(REMOVED, text)
        text = _FILE_URL.sub("", text)
        for pattern in (_ANY_PATH, _IN_HOME, _WINDOWS):
            text = pattern.sub(lambda match: _last(match[0]), text)
        return self._without_names(text) if self._names else text

    def _without_names(self, text: str) -> str:
        """Where a name may begin, slices of the lengths that names have are looked up: an expression of all
        names would take their number times the text."""
        folded, parts, end = _folded(text), list[str](), 0
        for begin in _BEGIN.finditer(folded):
            at = begin.start()
            if at < end:
                continue
            for length in self._lengths.get(folded[at : at + LEAST_GIVEN], ()):
                stop = at + length
                if folded[at:stop] in self._names and not folded[stop : stop + 1].isalnum():
                    parts += [text[end:at], REMOVED]
                    end = stop
                    break
        return "".join([*parts, text[end:]])


def _folded(text: str) -> str:
    """In lower case, character by character, so that places stay."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower()[0] for c in text)


def _is_name(word: str) -> bool:
    return word not in _known() and not word.isdigit()


@cache
def _known() -> frozenset[str]:
    return frozenset((*_COMMON, *OUTCOMES, *KINDS, *stacks()))


def _texts(value: Any) -> Iterator[str]:
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            todo += each
        elif isinstance(each, dict):
            todo += [*each, *each.values()]


def _last(path: str) -> str:
    """The name of the file of a path; none for a folder, whose name may be a person's."""
    name = PurePosixPath(path.replace("\\", "/")).name
    return name if re.fullmatch(r"[\w. +-]+\.\w{1,12}", name) else PATH


def _hashed(match: re.Match[str]) -> str:
    return hashlib.sha256(f"harness bundle {match[0].lower()}".encode()).hexdigest()[:32]


# The file of a bundle: a tar in zstd that has one form only, and is read within limits.
#
# The tar has regular files with fixed names, nothing else: no owner, no time, no other header. So the same
# members always give the same bytes, and a reader refuses all that a header might hide.


SUFFIX = ".tar.zst"
MANIFEST, RECORD = "manifest.json", "record.json"
TABLES = ("tokens", "memory", "sensors", "prefill", "windows", "turns", "users")
MAGIC = bytes.fromhex("28b52ffd")  # of a zstd frame
LEVEL = 10
_PIECE = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_NAME = re.compile(rf"manifest\.json|records/\d{{5}}/(?:record\.json|(?:{'|'.join(TABLES)})\.parquet)")
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
    tarfile.GNUTYPE_SPARSE: "a file with holes",
}


class NotABundle(ResultsError):
    """The file is no bundle, or one that this harness does not read."""


class Tampered(ResultsError):
    """The file is a bundle that nothing honest has written, or that was damaged on its way."""


def folder_of(number: int) -> str:
    """The folder of a record in the bundle: a number, since names may say who measured."""
    return f"records/{number:05}"


def packed(members: Mapping[str, bytes]) -> bytes:
    """The file of these members, in their order."""
    import pyarrow as pa

    blocks = []
    for name, content in members.items():
        blocks += [_header(name, len(content)), content, bytes(-len(content) % _BLOCK)]
    return bytes(pa.Codec("zstd", compression_level=LEVEL).compress(b"".join([*blocks, _END]), asbytes=True))


def is_bundle(path: Path) -> bool:
    """Whether a regular file begins as a bundle does."""
    try:
        with open_regular(path, links=True) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def unpacked(path: Path) -> dict[str, bytes]:
    """The members of a bundle by name. Raises NotABundle, and Tampered: cut off, too large, or with members
    that no bundle has. Sizes are checked before anything of that size is held."""
    try:
        packed = read_regular(path, bounds.BUNDLE_PACKED_BYTES, links=True)
    except OSError as refusal:
        raise NotABundle(f"{path}: not a bundle: {refusal.strerror}") from refusal
    if packed[: len(MAGIC)] != MAGIC:
        raise NotABundle(f"{path}: not a bundle: it is not compressed with zstd")
    members = _archive_members(_decompressed(packed))
    if MANIFEST not in members:
        raise NotABundle(f"{path}: not a bundle: it has no {MANIFEST}")
    return members


def _decompressed(packed: bytes) -> memoryview:
    import pyarrow as pa

    found = bytearray()
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
            while piece := stream.read(_PIECE):
                found += piece
                if len(found) > bounds.BUNDLE_BYTES:
                    raise Tampered(f"it unpacks to more than {bounds.BUNDLE_BYTES >> 20} MiB")
    except (OSError, MemoryError, pa.ArrowException) as damage:
        raise Tampered(f"it is cut off or damaged: {shortened(str(damage))}") from damage
    return memoryview(found)


def _archive_members(data: memoryview) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    at = 0
    while any(block := bytes(data[at : at + _BLOCK])):
        name, size = _read_header(block, len(members) + 1)
        if name in members:
            raise Tampered(f"two of its files have the name {name}")
        if len(members) == bounds.BUNDLE_MEMBERS:
            raise Tampered(f"it has more than {bounds.BUNDLE_MEMBERS:,} files")
        begin, end = at + _BLOCK, at + _BLOCK + size
        at = end + -size % _BLOCK
        if at > len(data) or any(data[end:at]):
            raise Tampered(f"{name} is cut off, or something is hidden behind it")
        members[name] = bytes(data[begin:end])
    if data[at:] != _END:
        raise Tampered("it is cut off, or something is hidden behind its last file")
    return members


def _read_header(block: bytes, number: int) -> tuple[str, int]:
    """Name and size of a member. Raises Tampered for a member that no bundle has."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as damage:
        raise Tampered(f"the header of its file {number} is damaged") from damage
    shown = shortened(info.name)
    if info.type != tarfile.REGTYPE:
        raise Tampered(f"its file {number}, {shown}, is {_KINDS.get(info.type, 'of an unknown type')}")
    if info.name.startswith("/"):
        raise Tampered(f"the name of its file {number} is an absolute path: {shown}")
    if ".." in info.name.split("/"):
        raise Tampered(f"the name of its file {number} leads out of the bundle: {shown}")
    if not _NAME.fullmatch(info.name):
        raise Tampered(f"no bundle has a file of this name: {shown}")
    if not 0 <= info.size <= bounds.BUNDLE_BYTES:
        raise Tampered(f"{shown} claims a size of {info.size:,} bytes")
    if block != _header(info.name, info.size):
        raise Tampered(f"the header of {shown} has more than a name and a size: an owner, a time or a mode")
    return info.name, info.size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


# The figures and verdicts of records: as a bundle claims them, and as its records give them. Pure.


TOLERANCE = 1e-6  # relative: the same arithmetic on another CPU

BundleFigures = dict[str, float | str | None]


def figures_of(stored: Sequence[Stored], gathered: Study) -> list[BundleFigures]:
    """The figures of each record, in order; empty for one that cannot be analysed."""
    rows = {
        each.folder: _of_repeat(row, fitted)
        for row, fitted, each in zip(gathered.repeats, gathered.fitted, gathered.stored, strict=True)
    }
    found = []
    for each in stored:
        try:
            found.append(_figures(each, rows))
        except FAULTS:
            found.append({})
    return found


def _of_repeat(row: Repeat, fitted: BundleFigures) -> BundleFigures:
    return {
        "status": row["status"],
        "tokens": row["tokens"],
        "ttft_ms": row["ttft_ms"],
        "tokens_per_s": row["tokens_per_s"],
        **fitted,
        "bandwidth_share": row["bandwidth_share"],
        "peak_rss_bytes": row["peak_rss_bytes"],
        "peak_vram_bytes": row["peak_vram_bytes"],
        "max_ctx": row["max_ctx"],
        "joules_per_token": row["joules_per_token"],
    }


def _figures(each: Stored, rows: Mapping[Path, BundleFigures]) -> BundleFigures:
    if each.record["kind"] == "checked":
        return {"verdict": agreement.row(each.record)["verdict"]}
    if each.record["kind"] != "searched":
        return rows.get(each.folder, {})
    row = dataset_table.search_row(each.record)
    return {
        "status": row["status"],
        "verified_n_ctx": row["verified_n_ctx"],
        "allocated_n_ctx": row["allocated_n_ctx"],
        "limit_bytes": row["limit_bytes"],
    }


def figure_differences(claimed: Mapping[str, object], computed: BundleFigures) -> list[str]:
    """A sentence for each figure that differs from the records."""
    return [
        f"{name} is {_shown(computed.get(name))} by its record, but {_shown(claimed.get(name))} was claimed"
        for name in _all(claimed, computed)
        if not _same(claimed.get(name), computed.get(name))
    ]


def _all(*of: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for names in of for name in names))


def _same(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return bool(a == b)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(str(value)) if isinstance(value, str | int | None) else "no single value"


# The content key of a shared record, made of the record alone, so that everybody can compute it. Pure.
#
# A campaign's own key is made of paths, UUIDs and sources of weights, which a bundle does not have.


_WEIGHTS = (
    "kind",
    "seed",
    "repo",
    "revision",
    "fingerprint",
    "quant",
    "format",
    "synthetic",
    "header",
    "packing",
)
_ENVIRONMENT = ("name", "variables", "toolkit", "lock", "adopted")


def shared_keys(record: Record) -> str | None:
    """The key of its cell, options, build, versions, weights, machine and device; null where they are not
    known: it never got ready to run, or it is a check or a published figure."""
    environment = record.get("environment") or {}
    if record["kind"] not in ("measured", "searched") or not environment or "options" not in record:
        return None
    protocol, weights = record.get("protocol") or {}, record["model"]["weights"]
    budget = record.get("memory_budget")
    facts = [
        *(record["cell"], record["stack"], record["variant"], record["asked"].get("options")),
        *(record["options"], record.get("threads"), record["model"]["name"], record["model"].get("shape")),
        [weights.get(name) for name in _WEIGHTS],
        [environment.get(name) for name in _ENVIRONMENT],
        *(record["workload"], record["machine"]["slug"], record.get("device")),
        *(protocol.get("memory_budget"), budget and budget["means"]),
        protocol.get("timeout_s") if record["kind"] == "searched" else None,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def by_own(records: Sequence[Record], after: Sequence[Record]) -> dict[str, str]:
    """The shared key for each content key of some records; `after`: the same records as they are shared. None
    for a key whose records have several shared keys, or share theirs with another."""
    found: dict[str, set[str]] = {}
    for record, anonymous in zip(records, after, strict=True):
        if (key := shared_keys(anonymous)) is not None:
            found.setdefault(record["content_key"], set()).add(key)
    once = {own: keys.pop() for own, keys in found.items() if len(keys) == 1}
    return {own: key for own, key in once.items() if [*once.values()].count(key) == 1}


# Make a bundle of records, and read one: a manifest with hashes, and each record with its tables.


Manifest = dict[str, Any]  # JSON just read, of a stranger
FORMAT = "harness bundle"
# History (raise it where an older reader would read something else):
#   1  first version
VERSION = 1


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle that was read: its manifest, and the folder where its records are now."""

    manifest: Manifest
    folder: Path


def made(stored: Sequence[Stored], anonymizer: Anonymizer) -> bytes:
    """The file of these records, in their order. Raises ResultsError for one that cannot be shared: a series
    is damaged, or the record is none without the names that were to be taken out."""
    for each in stored:
        anonymizer.learn(each.record)
    try:
        records, unknown = _anonymous([each.record for each in stored], anonymizer)
    except ValueError as damage:
        raise ResultsError(f"a record cannot be shared: it is {damage}") from damage
    members: dict[str, bytes] = {MANIFEST: b""}
    with tempfile.TemporaryDirectory() as folder:
        for number, (each, record) in enumerate(zip(stored, records, strict=True), start=1):
            if wrong := wrong_with(record):
                raise ResultsError(f"{each.folder}: cannot be shared: without the names taken out, {wrong}")
            members |= _members(folder_of(number), each, record, Path(folder), anonymizer)
    manifest = {"format": FORMAT, "version": VERSION, "harness": harness.__version__}
    manifest |= {"records": len(records), "keys_not_recomputed": unknown, "figures": _claims(members)}
    manifest["files"] = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in members.items()
        if name != MANIFEST
    }
    members[MANIFEST] = _text(manifest)
    return packed(members)


def _anonymous(records: Sequence[Record], anonymizer: Anonymizer) -> tuple[list[Record], list[str]]:
    """The records without what identifies a person, and their content keys that cannot be recomputed."""
    after = [cast(Record, anonymizer.value(record)) for record in records]
    known = by_own(records, after)
    for record, shared in zip(records, after, strict=True):
        shared["content_key"] = known.get(record["content_key"], shared["content_key"])
        if shared["kind"] == "checked":
            shared["check"]["speaks_for"] = [known.get(key, key) for key in record["check"]["speaks_for"]]
    unknown = {each["content_key"] for each in after if shared_keys(each) not in (None, each["content_key"])}
    return after, sorted(unknown)


def _members(
    name: str, each: Stored, record: Mapping[str, Any], folder: Path, anonymizer: Anonymizer
) -> dict[str, bytes]:
    """The files of one record. Tables are written anew: a file may hold more than its columns."""
    members = {f"{name}/{RECORD}": _text(record)}
    for table in TABLES:
        if columns := read_columns(each.folder / f"{table}.parquet", ()):
            write_columns(
                copy := folder / "table", {anonymizer.text(key): values for key, values in columns.items()}
            )
            members[f"{name}/{table}.parquet"] = copy.read_bytes()
    return members


def _claims(members: Mapping[str, bytes]) -> list[BundleFigures]:
    with _laid_out(members) as folder:
        stored = records_in(folder)
        return figures_of(stored, load_study(stored))


def write(path: Path, content: bytes) -> None:
    """Write a file that must be new. Raises ResultsError: it is there already, or cannot be written."""
    try:
        with path.open("xb") as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                path.unlink()
                raise
    except FileExistsError:
        raise ResultsError(f"{path}: exists already; choose another name, or delete it first") from None
    except OSError as refusal:
        raise ResultsError(f"{path}: cannot be written: {refusal.strerror}") from refusal
    sync_folder(path.parent)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Read a bundle, its hashes checked, and lay its records out in a folder that is deleted afterwards.
    Raises NotABundle and Tampered."""
    members = unpacked(path)
    manifest = _manifest(path, members)
    with _laid_out(members) as folder:
        yield Bundle(manifest, folder)


@contextlib.contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """The results folder of a bundle; of a folder itself. Raises as opened()."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(opened(path)).folder if is_bundle(path) else path
        except Tampered as damage:
            raise Tampered(f"{path}: {damage}") from damage


def records_in(folder: Path) -> list[Stored]:
    """The records of a bundle, in order. Raises Tampered for one that cannot be read."""

    def damaged(damage: ResultsError) -> None:
        raise Tampered(str(damage).replace(f"{folder}/", ""))

    return list(records.records(folder, damaged))


@contextlib.contextmanager
def _laid_out(members: Mapping[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="harness-bundle-") as at:
        for name, content in members.items():
            if name != MANIFEST:
                path = Path(at, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        yield Path(at)


def _manifest(path: Path, members: Mapping[str, bytes]) -> Manifest:
    """The manifest, which must have every file with its hash. Raises NotABundle and Tampered."""
    try:
        if len(members[MANIFEST]) > bounds.RECORD_BYTES:
            raise ValueError
        manifest = strict_json(members[MANIFEST])
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError
    except ValueError:
        raise NotABundle(f"{path}: not a bundle: its {MANIFEST} is not that of one") from None
    if (version := manifest.get("version")) != VERSION:
        this = f"this harness reads version {VERSION}; use the harness that made it, or a newer one"
        raise NotABundle(f"{path}: a bundle of version {str(version)[:20]}: {this}")
    files = manifest.get("files")
    names = set(members) - {MANIFEST}
    if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
        raise Tampered("its manifest has no list of files")
    if more := sorted(names ^ set(files)):
        where = "not in its manifest" if more[0] in names else "in its manifest, but missing"
        raise Tampered(f"{more[0]} is {where}")
    values = 0
    for name, of in files.items():
        if of.get("sha256") != hashlib.sha256(members[name]).hexdigest():
            raise Tampered(f"{name} is not as its manifest says: another hash")
        values += _claimed_values(name, members[name])
        if values > bounds.BUNDLE_VALUES:
            raise Tampered(f"its tables have more than {bounds.BUNDLE_VALUES:,} values")
    return manifest


def _claimed_values(name: str, content: bytes) -> int:
    """How many values a table has by its footer; of each file alone its reader checks the pages too."""
    if not name.endswith(".parquet"):
        return 0
    try:
        return sum(map(files.page_values, files.page_columns(content)))
    except (*FAULTS, RecursionError) as damage:
        raise Tampered(f"{name}: not a series: its footer is damaged") from damage


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()
