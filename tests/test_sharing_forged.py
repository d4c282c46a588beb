"""Forged bundles are refused, each with its reason.

All are made of one honest bundle, of real llama.cpp and fake cells, or of the published study. Hashes and
figures are the forger's own, computed anew, unless they are the point.
"""

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forging import HONEST, Forgery, tar_of, with_member, zstd

from harness.machine import slug
from harness.records.kinds import Record
from harness.share import make_bundle, recomputed
from harness.share.anonymize import Anonymizer
from harness.share.read_bundle import records_in
from harness.share.verify import verify

PUBLISHED = Path(__file__).parent.parent / "results" / "published" / "rtx4090-qwen1.5" / "qwen1.5-14b"
OTHER_CPU = "AMD Ryzen 9 9950X 16-Core Processor"
LLAMA, CLOCKED, DIES, SEARCH = ".llamacpp.q8_0.decode", ".fake.clocked.decode", ".fake.dies.", ".max_ctx."


def reasons(path: Path) -> str:
    found = verify(path)
    assert found.accepted == (not found.reasons)
    return "\n".join(reason.line for reason in found.reasons)


def forged(folder: Path, change: Callable[[Forgery], Any], honest: Path = HONEST, **written: bool) -> str:
    """Why a bundle is refused that was changed so."""
    forgery = Forgery(honest)
    change(forgery)
    return reasons(forgery.write(folder / "forged.tar.zst", **written))


def test_the_honest_bundle_is_accepted():
    assert reasons(HONEST) == ""


# Signs in the file itself

FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in the middle": (lambda raw: raw[: len(raw) // 2], "cut off or damaged"),
    "cut by one byte": (lambda raw: raw[:-1], "cut off or damaged"),
    "bytes behind the end": (lambda raw: raw + b"more", "damaged"),
    "a second archive behind the first": (lambda raw: raw + zstd(b"more"), "hidden behind its last file"),
    "the end of the tar is missing": (lambda raw: zstd(tar_of(HONEST)[:-1024]), "hidden|cut off"),
    "cut within a file": (lambda raw: zstd(tar_of(HONEST)[:-2048]), "cut off"),
    "a bomb of zeros": (lambda raw: zstd(bytes(1 << 28)), "unpacks to more than 96 MiB"),
    "a bomb behind the files": (
        lambda raw: zstd(tar_of(HONEST) + bytes(1 << 28)),
        "unpacks to more than 96 MiB",
    ),
    "a damaged header": (lambda raw: zstd(b"x" + tar_of(HONEST)[1:]), "header of its file 1 is damaged"),
    "something in the gap behind a file": (lambda raw: zstd(_in_gap(tar_of(HONEST))), "more than name and"),
    "a size below 0": (lambda raw: zstd(_of_size(tar_of(HONEST), b"\xff" * 12)), "more than name and"),
    "a size beyond its end": (lambda raw: zstd(_of_size(tar_of(HONEST), b"\x80" + b"\x01" * 11)), "cut off"),
}


def _in_gap(data: bytes) -> bytes:
    size = int(data[124:135], 8)
    assert size % 512
    return data[: 512 + size] + b"x" + data[512 + size + 1 :]


def _of_size(data: bytes, size: bytes) -> bytes:
    """The first file with another size, in base 256, and a checksum that fits."""
    header = data[:124] + size + data[136:148] + b" " * 8 + data[156:512]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:] + data[512:]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_or_filled_is_refused(tmp_path, name):
    change, reason = FILES[name]
    (path := tmp_path / "forged.tar.zst").write_bytes(change(HONEST.read_bytes()))
    assert re.search(reason, reasons(path))


def _info(name: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


NOT_REGULAR, NO_NAME, MORE = "is no regular file", "a name that no bundle has", "an owner, a time"
MEMBERS: dict[str, tuple[tarfile.TarInfo, str]] = {
    "an absolute path": (_info("/etc/cron.d/x"), NO_NAME),
    "a path that leads out": (_info("records/../../x"), NO_NAME),
    "a symbolic link": (_info("records/00001/x", tarfile.SYMTYPE, linkname="/etc/passwd"), NOT_REGULAR),
    "a hard link": (_info("records/00001/x", tarfile.LNKTYPE, linkname="/etc/passwd"), NOT_REGULAR),
    "a device": (_info("records/00001/x", tarfile.CHRTYPE, devmajor=1, devminor=5), NOT_REGULAR),
    "a pipe": (_info("records/00001/x", tarfile.FIFOTYPE), NOT_REGULAR),
    "a folder": (_info("records/00099", tarfile.DIRTYPE), NOT_REGULAR),
    "a script": (_info("records/00001/setup.sh"), NO_NAME),
    "a long header": (_info("records/" + "x" * 200), NOT_REGULAR),
    "a name that is there already": (_info("records/00001/record.json", mode=0o644), "or has twice"),
    "an owner": (_info("records/00099/record.json", uname="me"), MORE),
    "a time": (_info("records/00099/record.json", mtime=1), MORE),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_that_no_bundle_has_is_refused(tmp_path, name):
    info, reason = MEMBERS[name]
    (path := tmp_path / "forged.tar.zst").write_bytes(with_member(info))
    assert reason in reasons(path)
    assert sorted(tmp_path.iterdir()) == [path]


def test_more_files_than_a_bundle_may_have_are_refused(tmp_path):
    more = {f"records/{number:05}/tokens.parquet": b"" for number in range(20_000, 40_001)}
    assert "more than 20,000 files" in forged(tmp_path, lambda f: f.members.update(more), claims=False)


def test_more_values_than_a_bundle_may_have_are_refused_unread(tmp_path):
    bomb = _table(3_000_000)
    tables = {f"{folder}/tokens.parquet": bomb for folder in Forgery().of("decode")}
    assert "more than 16,777,216 values" in forged(tmp_path, lambda f: f.members.update(tables), claims=False)


# Signs in the manifest


def _edit_unhashed(forgery: Forgery) -> None:
    name = f"{forgery.of(LLAMA)[0]}/record.json"
    forgery.members[name] = forgery.members[name].replace(b'"repeat": 1', b'"repeat": 9')


UNHASHED: dict[str, tuple[Callable[[Forgery], Any], str]] = {
    "a record edited": (_edit_unhashed, "is not as its manifest says: another hash"),
    "a series missing": (lambda f: f.members.pop(f"{f.of(LLAMA)[0]}/tokens.parquet"), "but missing"),
    "a file that it does not list": (
        lambda f: f.members.update({"records/00099/memory.parquet": b""}),
        "not in its manifest",
    ),
    "a faster figure claimed": (lambda f: _claim(f, LLAMA, B_ms=0.01), "B_ms is .* but 0.01 was claimed"),
    "more tokens per second claimed": (lambda f: _claim(f, LLAMA, tokens_per_s=1e6), "tokens_per_s is"),
    "a crash claimed as ok": (
        lambda f: _claim(f, DIES, status="ok"),
        "status is error by its record, but ok was claimed",
    ),
    "fewer records claimed": (lambda f: f.manifest.update(records=1), "its manifest claims 1"),
    "no figures": (lambda f: f.manifest.update(figures=None), "does not have the figures"),
    "no list of files": (lambda f: f.manifest.update(files=[]), "no list of files"),
}


def _claim(forgery: Forgery, part: str, **figures: Any) -> None:
    forgery.manifest["figures"][forgery.folders().index(forgery.of(part)[0])].update(figures)


@pytest.mark.parametrize("name", UNHASHED)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, name):
    change, reason = UNHASHED[name]
    assert re.search(reason, forged(tmp_path, change, claims=False, hashes=False))


# What recomputation shows, with hashes and figures of the forger's own


def _machine(forgery: Forgery, **facts: Any) -> None:
    """Another machine in all records, with the name that its facts give."""
    for folder in forgery.folders():
        forgery.edit(folder, machine=lambda machine: machine | facts)
        machine = forgery.record(folder)["machine"]
        gpus = [gpu["name"] for gpu in machine["gpus"]]
        own = slug(machine["cpu"], machine["physical_cores"], machine["memory_bytes"], gpus)
        forgery.edit(folder, machine__slug=own)


def _rekey(forgery: Forgery, folder: str) -> None:
    record: Record = forgery.record(folder)  # type: ignore[assignment]
    if key := recomputed.shared_key(record):
        forgery.edit(folder, content_key=key)


def _all(forgery: Forgery, part: str, rekey: bool = False, **changes: Any) -> None:
    for folder in forgery.of(part):
        forgery.edit(folder, **changes)
        if rekey:
            _rekey(forgery, folder)


def edited(part: str, **changes: Any) -> Callable[[Forgery], None]:
    return lambda f: _all(f, part, **changes)


def begun(day: str) -> Callable[[Forgery], None]:
    at = f"{day}T00:00:00+00:00"
    return edited(LLAMA, started_utc=at, timing__started_utc=at)


GPU = {"name": "NVIDIA GeForce RTX 4090", "memory_bytes": 25757220864, "uuid": None}
GPU |= {"compute_capability": "8.9"}


def timed(part: str, change: Callable[[Any], Any], stamps: bool = True) -> Callable[[Forgery], None]:
    return lambda f: f.series(f.of(part)[0], change, stamps)


def _moved_copy(forgery: Forgery) -> None:
    """A repeat more, at another time, its series another's."""
    new = forgery.copy(forgery.of(LLAMA)[0], repeat=9, started_utc="2027-01-01T00:00:00+00:00")
    forgery.edit(new, timing__started_utc="2027-01-01T00:00:00+00:00", place_in_order=lambda p: [99, 99])
    forgery.edit(new, done__start_ns=lambda ns: ns + 1)


def _positions(forgery: Forgery) -> None:
    folder = forgery.of(LLAMA)[0]
    columns = forgery.columns(folder)
    forgery.put(folder, {**columns, "n": [n + 1 for n in columns["n"]]})


def _one_faster(forgery: Forgery) -> None:
    """The slowest decode steps become ordinary, and others make up for them: the total stays."""

    def change(ns: Any) -> Any:
        late = np.argsort(ns[1:])[-20:] + 1
        spare = ns[late].sum() - 20 * np.median(ns)
        changed = ns.copy()
        changed[late] = np.median(ns)
        changed[1:] += spare / (len(ns) - 1)
        changed[1] += 400_000
        changed[2:22] -= 20_000
        return changed

    forgery.series(forgery.of(CLOCKED)[0], change)


def _table(length: int) -> bytes:
    """A table of two columns that is small on disk."""
    rows = pa.nulls(length, pa.int64()).fill_null(1)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": rows, "latency_ns": rows}), sink, compression="zstd")
    return bytes(sink.getvalue())


def _parquet_bomb(forgery: Forgery) -> None:
    forgery.members[f"{forgery.of(LLAMA)[0]}/tokens.parquet"] = _table(5_000_000)


def _fit_probe(forgery: Forgery) -> None:
    folder = forgery.of(SEARCH)[0]
    most = max(probe["n_ctx"] for probe in forgery.record(folder)["search"]["probes"])
    forgery.edit(folder, search__verified_n_ctx=most * 2)


def _roomier(forgery: Forgery) -> None:
    def change(probes: Any) -> Any:
        return [probe | {"fits": True, "peak_bytes": 2 * probe["limit_bytes"]} for probe in probes]

    forgery.edit(forgery.of(SEARCH)[0], search__probes=change)


RECOMPUTED: dict[str, tuple[Callable[[Forgery], Any], str]] = {
    # another machine
    "a GPU added": (edited(LLAMA, machine__gpus=[GPU]), "its CPU, memory and GPUs give .*rtx-4090"),
    "another CPU": (edited(LLAMA, machine__cpu=OTHER_CPU), "its CPU, memory and GPUs give amd-ryzen"),
    "another CPU, and its name": (
        lambda f: _machine(f, cpu=OTHER_CPU),
        "its content key .* is not that of its facts",
    ),
    "more memory": (edited(LLAMA, machine__memory_bytes=2**37), "its CPU, memory and GPUs give"),
    # another variant
    "another model": (edited(LLAMA, model__name="qwen2-72b"), "is not one of model qwen2-72b"),
    "an option that did not run": (edited(LLAMA, options__flash_attn=True), "content key"),
    "an option, and its key": (
        edited(LLAMA, rekey=True, options__flash_attn=True),
        "status is invalid by its record",
    ),
    "more threads": (edited(LLAMA, threads=64), "it claims 64 threads"),
    "real weights": (edited(LLAMA, model__weights__synthetic=False), "synthetic, but marked as real"),
    "smaller weights": (edited(LLAMA, model__weights__header__model_bytes=500_000), "but by type they are"),
    "weights of more parameters": (
        edited(LLAMA, model__weights__header__parameters=10**9),
        "parameters, but its shape",
    ),
    "another kernel": (
        edited(CLOCKED, loaded__kernels={"slow": 1}, loaded__kernel_asked="fast"),
        "status is invalid by its record, but ok was claimed",
    ),
    # counts and times
    "tokens that were not evaluated": (
        edited(LLAMA, done__counters__prompt_evaluated=1),
        "tokens were evaluated, but 1 of the prompt",
    ),
    "a run in the future": (begun("2999-01-01"), "it began in the future"),
    "a run before its campaign": (begun("2020-01-01"), "it began before its campaign"),
    "a crash made ok": (edited(DIES, outcome="ok", reason=None), "not a record: done must be|is missing"),
    "a shorter life": (edited(LLAMA, timing__wall_s=0.01), "its process lived for 0.01 s"),
    # memory
    "less memory": (edited(LLAMA, memory__peak_rss_anon_bytes=1 << 20), "rss_anon_bytes peaks at"),
    "no samples": (
        lambda f: f.members.pop(f"{f.of(LLAMA)[0]}/memory.parquet"),
        "samples of memory, but has 0",
    ),
    "more memory than the machine has": (edited(LLAMA, done__peak_rss_bytes=2**50), "but its machine has"),
    # the series
    "twice as fast": (timed(LLAMA, lambda ns: ns * 0.5), "two clocks differ|status is invalid|times"),
    "a tenth faster": (timed(LLAMA, lambda ns: ns * 0.9), "but its steps alone"),
    "a fiftieth faster": (timed(LLAMA, lambda ns: ns * 0.97), "but its steps alone"),
    "faster than its phase": (
        timed(CLOCKED, lambda ns: ns * 100),
        "longer than their phase|but its process lived",
    ),
    "two tokens for one": (timed(LLAMA, lambda ns: ns[:-100]), "but it claims"),
    "cut short, and said so": (
        lambda f: (
            f.series(f.of(LLAMA)[0], lambda ns: ns[:-100]),
            f.edit(f.of(LLAMA)[0], tokens=lambda t: t - 100),
        ),
        "status is invalid by its record|the stack decoded",
    ),
    "a faster first token": (
        timed(LLAMA, lambda ns: np.r_[ns[0] / 10, ns[1:]], stamps=False),
        "its first token came after",
    ),
    "spikes taken out": (
        timed(LLAMA, lambda ns: np.minimum(ns, np.median(ns)), stamps=False),
        "its last token came after",
    ),
    "other positions": (_positions, "positions of its tokens do not follow"),
    "a token in no time": (timed(LLAMA, lambda ns: np.r_[ns[:5], 0, ns[6:]]), "took no time"),
    "times moved between tokens": (_one_faster, "status is invalid by its record, but ok was claimed"),
    "a token of another model": (
        lambda f: f.put(f.of(LLAMA)[0], f.columns(f.of(LLAMA)[0]) | {"token_id": [10**6] * 1200}),
        "beyond a vocabulary",
    ),
    "a series that unpacks to much": (_parquet_bomb, "more than 4,194,304 values"),
    "no series": (lambda f: f.members.pop(f"{f.of(LLAMA)[0]}/tokens.parquet"), "its series has 0 tokens"),
    # records against each other
    "a repeat twice": (lambda f: f.copy(f.of(LLAMA)[0], repeat=9), "it began at the same moment as"),
    "a repeat copied to another time": (_moved_copy, "its series is that of"),
    "another cell's key": (
        lambda f: _all(f, LLAMA, content_key=f.record(f.of(CLOCKED)[0])["content_key"]),
        "content key",
    ),
    # searches
    "a longer context": (_fit_probe, "which none of its probes shows to fit"),
    "a probe beyond its limit": (_roomier, "took more memory than its limit"),
    # what identifies
    "a path": (edited(LLAMA, reason="see /home/alice/log.txt"), "it names a path"),
    "an address": (edited(LLAMA, campaign__name="by me@example.org"), "it names a path, an address"),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_forgery_with_hashes_of_its_own_is_refused_by_what_its_records_say(tmp_path, name):
    change, reason = RECOMPUTED[name]
    assert re.search(reason, forged(tmp_path, change))


# The published study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.tar.zst"
    path.write_bytes(make_bundle.made(records_in(PUBLISHED), Anonymizer()))
    return path


def test_a_change_within_the_tolerance_of_the_second_clock_passes(tmp_path):
    assert forged(tmp_path, lambda f: f.series(f.of(LLAMA)[0], lambda ns: ns * 0.995)) == ""


def test_the_published_study_is_accepted(study):
    assert reasons(study) == ""


Q8_0 = ".llamacpp.q8_0"
PRINTED: dict[str, tuple[Callable[[Forgery], Any], str]] = {
    "a faster B": (edited(Q8_0, reported__B_ms=0.5), "its B_ms is 0.5, but .* was printed"),
    "a longer context": (edited(Q8_0, reported__max_ctx=10**6), "its max_ctx is"),
    "a faster series": (timed(Q8_0, lambda ns: ns / 2, stamps=False), "its series gives"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_published_figure_that_was_changed_is_refused(tmp_path, study, name):
    change, reason = PRINTED[name]
    assert re.search(reason, forged(tmp_path, change, study))
