"""Bundles: the same bytes for the same records, nothing of a person in them, read like a folder."""

import copy
import hashlib
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import refused
from forging import HONEST, Forgery, tar_of, zstd
from golden_record import GOLDEN, write_record

from harness import records
from harness.records.kinds import wrong_with
from harness.share import make_bundle, read_bundle, recomputed
from harness.share.anonymize import REMOVED, Anonymizer
from harness.share.verify import verify

PUBLISHED = Path(__file__).parent.parent / "results" / "published" / "rtx4090-qwen1.5" / "qwen1.5-0.5b"
UUID = "6f1c2d3e-aaaa-bbbb-cccc-0123456789ab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with the records of the honest bundle."""
    at = tmp_path_factory.mktemp("results")
    with read_bundle.opened(HONEST) as opened:
        shutil.copytree(opened.folder, at, dirs_exist_ok=True)
    return at


# Writing


def test_the_same_results_give_the_same_bytes_wherever_they_lie(harness, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert harness("share", folder, "--bundle", "a.tar.zst").code == 0
    assert harness("share", "elsewhere", "--bundle", "b.tar.zst").code == 0
    assert (tmp_path / "a.tar.zst").read_bytes() == (tmp_path / "b.tar.zst").read_bytes()


def test_a_bundle_has_records_series_tables_and_hashes_and_no_log(folder, harness, tmp_path):
    (next(folder.rglob("record.json")).parent / "worker.log").write_text("what the stack said")
    assert harness("share", folder, "--bundle", "a.tar.zst").code == 0
    members = read_bundle.unpacked(tmp_path / "a.tar.zst")
    always = {"manifest.json", "record.json", "tokens.parquet", "memory.parquet"}
    assert {Path(name).name for name in members} >= always
    assert not any("log" in name for name in members)
    assert set(json.loads(members["manifest.json"])["files"]) == set(members) - {"manifest.json"}


def test_what_was_measured_now_is_bundled_and_accepted(harness, config, tmp_path):
    slow, dies = {"name": "slow", "B_ms": 10.0}, {"name": "dies", "die_at_token": 9}
    variants = [each | {"clock": "real"} for each in (slow, dies)]
    harness("run", config(*variants, new_tokens=60, repeats=1, sample_interval_ms=100))
    made = harness("share", "--bundle", "mine.tar.zst")
    assert made.code == 0, made.err
    said = harness("share", "--verify", "mine.tar.zst")
    assert (said.code, said.out.startswith("accepted: 2 records (")) == (0, True)


def test_what_is_verified_is_not_made_anonymous(harness):
    ran = harness("share", "--verify", "a.tar.zst", "--hide", "me")
    assert (ran.code, "--hide is for what is made" in ran.err) == (2, True)


def test_virtual_time_is_no_measurement_and_is_refused(harness, config):
    harness("run", config({"B_ms": 50.0}))
    made = harness("share", "--bundle", "mine.tar.zst")
    assert made.code == 1
    assert "harness share --verify would refuse it" in made.err
    assert "its process lived for" in made.err


def test_results_with_a_check_of_weights_are_bundled_and_accepted(harness, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "results")
    measured = json.loads((tmp_path / "results" / "records" / "00009" / "record.json").read_text())
    record = {key: measured[key] for key in [*measured][: [*measured].index("attempt")]}
    record |= {key: measured[key] for key in ("options", "device", "threads", "environment", "variables")}
    window = {"n": 25, "positions": 25, "not_finite": 0, "reference_not_finite": 0, "top1_agreement": 1.0}
    window |= {"relative_error": 0.01, "relative_error_max": 0.02, "kl_nats": 0.0, "near_ties": 0}
    asked = {"windows": [[0, 25]], "seconds": 60, "reference": {"stack": "hf", "variant": "fp32"}}
    reference = {"name": "hf fp32", "why": "it is float32"}
    check = {"asked": asked, "speaks_for": [record["content_key"]], "reference": reference}
    record |= {"kind": "checked", "outcome": "ok", "phase": "check", "reason": None, "tokens": 0}
    record |= {"started_utc": (began := "2026-11-24T21:14:30.000000+00:00"), "log_tail": []}
    record |= {"timing": {"started_utc": began, "wall_s": 0.5}}
    write_record(tmp_path / "results" / "records" / "00013", record | {"check": check | {"depths": [window]}})
    made = harness("share", "results", "--bundle", "mine.tar.zst")
    assert made.code == 0, made.err
    assert harness("share", "--verify", "mine.tar.zst").out.startswith("accepted: ")


@pytest.mark.parametrize("member", ["records/00001/record.json", "manifest.json"])
def test_a_key_that_is_there_twice_is_refused(harness, tmp_path, member):
    """Readers that take the first would see what the check of anonymity has not."""
    members = read_bundle.unpacked(HONEST)
    manifest = json.loads(members["manifest.json"])
    members[member] = b'{"prompt": "/home/jane", "prompt": 1, ' + members[member].lstrip()[1:]
    if member != "manifest.json":
        of = manifest["files"][member]
        of |= {"sha256": hashlib.sha256(members[member]).hexdigest(), "bytes": len(members[member])}
        members["manifest.json"] = json.dumps(manifest).encode()
    (tmp_path / "twice.tar.zst").write_bytes(make_bundle.packed(members))
    ran = harness("share", "--verify", "twice.tar.zst")
    assert ran.code != 0
    assert ("has key 'prompt' twice" if member != "manifest.json" else "not a bundle") in ran.out + ran.err


def test_many_names_are_taken_out_of_a_long_text():
    names = [f"jane-{number}doe" for number in range(8000)]
    anonymizer = Anonymizer()
    anonymizer.learn({"log": " ".join(f"/home/{name}/x" for name in names)})
    shared = anonymizer.text("|".join(f"by {name.upper()}: {name}s" for name in names))
    assert shared.count(REMOVED) == len(names)
    assert "JANE" not in shared
    assert shared.count("jane-") == len(names)  # longer words are others
    assert anonymizer.text(shared) == shared


def test_a_verifier_finds_nothing_more_in_what_was_made_anonymous():
    """What is taken out may leave a path that begins there."""
    anonymizer = Anonymizer(["jane"])
    for text in ("x~jane/x/home/jane.doe/x.log", "jane/y", "s/n jane/12345"):
        shared = anonymizer.text(text)
        assert "jane" not in shared
        assert Anonymizer().text(shared) == shared, text


@pytest.mark.parametrize("target", ["there.tar.zst", "link.tar.zst"])
def test_a_file_that_is_there_already_is_never_overwritten(harness, folder, tmp_path, target):
    (tmp_path / "there.tar.zst").write_text("precious")
    (tmp_path / "link.tar.zst").symlink_to("nowhere")
    refused(harness("share", folder, "--bundle", target), "exists already")
    assert (tmp_path / "there.tar.zst").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(harness, folder, small_disk):
    disk = small_disk("4k")
    ran = harness("share", folder, "--bundle", disk / "a.tar.zst")
    refused(ran, "cannot be written: No space left on device")
    assert list(disk.iterdir()) == []


# Reading


def test_a_bundle_is_reported_like_the_folder_that_it_was_made_of(harness, folder, tmp_path):
    shutil.copy(HONEST, tmp_path / "honest.tar.zst")
    of_folder, of_bundle = (
        harness("report", path, "--format", "md").out for path in (folder, "honest.tar.zst")
    )
    assert of_bundle.count("\n") > 10
    assert of_bundle == of_folder
    both = harness("report", "honest.tar.zst", PUBLISHED, "-o", "page.html")
    assert both.code == 0
    assert "rtx-4090" in (tmp_path / "page.html").read_text()


def test_what_is_not_ok_travels_along_and_synthetic_stays_synthetic(harness, tmp_path):
    shutil.copy(HONEST, tmp_path / "honest.tar.zst")
    rows = harness("share", "--verify", "honest.tar.zst", "--json").json["records"]
    assert {row.get("status") for row in rows} >= {"ok", "error"}
    cells = harness("report", "honest.tar.zst", "--format", "json").json
    assert {row["weights"] for row in cells if row["stack"] == "llamacpp"} == {"synthetic"}
    failed = [row for row in cells if row["variant"] == "dies"]
    assert {row["status"] for row in failed} == {"error"}
    assert failed[0]["reasons"]


def test_verify_prints_one_object_for_programs(harness, tmp_path):
    forgery = Forgery()
    forgery.edit(forgery.of(".llamacpp.")[0], threads=64)
    forgery.write(tmp_path / "forged.tar.zst")
    said = harness("share", "--verify", "forged.tar.zst", "--json")
    assert said.code == 1
    assert said.json["accepted"] is False
    assert any("64 threads" in reason["text"] for reason in said.json["reasons"])
    said = harness("share", "--verify", "forged.tar.zst")
    assert said.out.startswith("refused: ")


def test_a_record_of_another_bundle_is_a_copy(harness, tmp_path):
    for name in ("a.tar.zst", "b.tar.zst"):
        shutil.copy(HONEST, tmp_path / name)
    said = harness("share", "--verify", "b.tar.zst", "--beside", "a.tar.zst")
    assert said.code == 1
    assert "it began at the same moment as a.tar.zst, 00001: a copy" in said.out


FILES = {
    "empty.tar.zst": b"",
    "text.tar.zst": b"hello",
    "zeros.tar.zst": zstd(bytes(1024)),
    "list.tar.zst": make_bundle.packed({"manifest.json": b"[]"}),
    "newer.tar.zst": make_bundle.packed({"manifest.json": b'{"format": "harness bundle", "version": 9}'}),
}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("folder --bundle a.tar.zst", "harness: folder: no records\n"),
        ("missing --bundle a.tar.zst", "harness: missing: no such results folder\n"),
        ("folder --bundle a.zip", "harness: a.zip: a bundle's name ends in .tar.zst\n"),
        ("--verify pipe", "not a regular file"),
        ("--verify folder", "folder"),
        ("--verify missing", "No such file"),
        ("--verify empty.tar.zst", "not a bundle: it is not compressed with zstd"),
        ("--verify text.tar.zst", "not a bundle: it is not compressed with zstd"),
        ("--verify zeros.tar.zst", "not a bundle: it has no manifest.json"),
        ("--verify list.tar.zst", "its manifest.json is not that of one"),
        ("--verify newer.tar.zst", "a bundle of version 9: this harness reads version 1"),
    ],
)
def test_what_can_be_no_bundle_is_one_sentence(harness, tmp_path, arguments, reason):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    refused(harness("share", *arguments.split()), reason)
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "folder", "pipe"}


def test_a_record_that_nests_without_end_is_not_shared(harness, tmp_path):
    config: list[Any] = []
    for _ in range(100):
        config = [config]
    write_record(tmp_path / "results", GOLDEN | {"campaign": GOLDEN["campaign"] | {"config": config}})
    refused(harness("share", "results", "--bundle", "a.tar.zst"), "it is nested too deeply")


def test_a_damaged_bundle_is_one_sentence_for_the_report(harness, tmp_path):
    (tmp_path / "cut.tar.zst").write_bytes(HONEST.read_bytes()[:-9])
    refused(harness("report", "cut.tar.zst"), "harness: cut.tar.zst: it is cut off or damaged")


# What identifies a person

PLANTED = ("wilhelmina", "grace-workstation", "PF3XK72Q", "a4:bb:6d:01:02:03", UUID)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, each in items for found in places(each, (*way, key))]
    return [way] if isinstance(value, str) else []


def with_text_everywhere(record: dict[str, Any], text: str) -> tuple[dict[str, Any], int]:
    """The record with the text behind every text that leaves it one, and in how many places."""
    count = 0
    for way in places(record):
        changed = copy.deepcopy(record)
        *parents, last = way
        place: Any = changed
        for key in parents:
            place = place[key]
        place[last] = f"{place[last]} {text}"
        if wrong_with(changed) is None:
            record, count = changed, count + 1
    return record, count


def test_no_text_of_a_record_brings_a_name_a_path_or_a_number_into_a_bundle(harness, tmp_path):
    user, host, serial, mac, uuid = PLANTED
    text = (
        f"{user} on {host} and {socket.gethostname()}, /home/{user}/my/secret.d/x, ~{user}/y, "
        f"-I/home/{user}/z, {user}@{host}, serial: {serial}, {serial}, {mac}, "
        f"{mac.upper().replace(':', '-')}, GPU-{uuid}, {uuid.upper()}"
    )
    record, count = with_text_everywhere(copy.deepcopy(GOLDEN), text)
    assert count > 50
    record["machine"]["host_name"] = record["serial_number"] = record["done"]["mac_address"] = "unlabelled"
    record["log_tail"] = [f"{user} did this"]
    record["nickname"] = "unlabelled"  # no type of record names it
    write_record(tmp_path / "results" / user / host, record)
    harness("share", "results", "--bundle", "a.tar.zst", "--hide", host)
    content = tar_of(tmp_path / "a.tar.zst").lower()
    for name in (*PLANTED, socket.gethostname(), "secret.d", "/home/", "unlabelled", mac.replace(":", "-")):
        word = re.escape(name.lower().encode())
        assert not re.search(rb"(?<![a-z0-9])" + word + rb"(?![a-z0-9])", content), name
    assert b"did this" not in content


def test_this_users_and_this_machines_names_go_without_being_named(harness, tmp_path):
    record = copy.deepcopy(GOLDEN)
    record["campaign"]["name"] = f"of zaphod on {socket.gethostname()}"
    write_record(tmp_path / "results", record)
    harness("share", "results", "--bundle", "a.tar.zst", LOGNAME="zaphod")
    content = tar_of(tmp_path / "a.tar.zst")
    assert b"of (removed) on (removed)" in content


def test_a_device_keeps_one_name_that_is_no_uuid():
    once, twice = (Anonymizer().text(text) for text in (f"GPU-{UUID}", f"on GPU-{UUID.upper()}"))
    assert once.startswith("GPU-")
    assert once in twice
    assert UUID not in once


@pytest.mark.parametrize(
    "text",
    [
        "llama-cpp-python==0.3.36",
        "nvidia-cublas-cu12==12.4.5.8",
        "https://github.com/noooop/noooop.github.io/tree/main/benchmarking",
        "25 tok/s at n = 1, and/or 3 GB/s",
        "Qwen/Qwen1.5-0.5B-Chat-GGUF",
        "2026-11-20T08:08:39.619499+00:00",
        "47afc9a7ba6dd8a9-982752-1795160438471478821",
        "CPU : SSE3 = 1 | AVX = 1",
        "amd-epyc-2c-24gib",
        "always [madvise] never",
        "-DGGML_METAL=off -DLLAVA_BUILD=OFF",
    ],
)
def test_what_says_how_it_was_measured_stays(text):
    assert Anonymizer(["wilhelmina"]).text(text) == text


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("/home/wilhelmina/models/q4_k_m.gguf", "q4_k_m.gguf"),
        ("/data/my models/a b.gguf", "a b.gguf"),
        ("/data/models/mine", "(path)"),
        ("LD=/opt/cuda/lib64:/home/x/lib", "LD=(path):(path)"),
        ("pkg @ file:///home/x/wheels/a-1.whl", "pkg @ a-1.whl"),
        ("https://me:pw@pypi.corp/simple?token=1", "https://***@pypi.corp/simple?***"),
        ("S/N: 4711-0815", "(removed)"),
        (r"C:\Users\x\m.gguf", "m.gguf"),
    ],
)
def test_paths_credentials_and_serial_numbers_do_not_stay(text, shared):
    assert Anonymizer().text(text) == shared
    assert Anonymizer().text(shared) == shared


def test_content_keys_follow_from_what_is_shared(folder):
    stored = list(records.records(folder, print))
    assert stored
    for result in stored:
        assert recomputed.shared_key(result.record) in (None, result.record["content_key"])


def test_verifying_writes_nothing_where_it_runs(harness, tmp_path):
    shutil.copy(HONEST, tmp_path / "honest.tar.zst")
    assert harness("share", "--verify", "honest.tar.zst").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["honest.tar.zst"]
    assert verify(tmp_path / "honest.tar.zst").accepted
