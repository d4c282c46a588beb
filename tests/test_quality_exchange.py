"""References as files: what is written is what is read, and a wrong or damaged file is one sentence."""

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.analysis.token_scores import kept as kept_form
from harness.base import bounds, data
from harness.campaign import reference_scores
from harness.campaign.quality import no_room
from harness.campaign.reference_files import BadReference, GivenReference, Origin, write_reference
from harness.config import Quality
from harness.models import locate

MODEL = "austen-4m"
WORKLOAD = Quality(n_ctx=16, chunks=3)
ORIGIN = Origin("text", WORKLOAD, "ids")
VOCABULARY = 40


@pytest.fixture
def reference(tmp_path, monkeypatch) -> reference_scores.KeptReference:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    chance = np.random.default_rng(5)

    def make(folder: Path) -> dict:
        with reference_scores.Writer(folder, WORKLOAD.chunks) as writer:
            for number in range(WORKLOAD.chunks):
                logits = chance.normal(0, 3, (WORKLOAD.positions, VOCABULARY)).astype(np.float32)
                writer.add(number, kept_form(logits, [0] * WORKLOAD.positions))
        return {"name": "hf fp32", "why": "it fits", "weights": {"file": "/home/someone/model"}}

    return reference_scores.kept({"test": 1}, make)


@pytest.fixture
def file(reference, tmp_path) -> Path:
    path = tmp_path / "reference.zip"
    write_reference(path, reference, ORIGIN, MODEL, locate.local(data.weights(MODEL)))
    return path


def test_what_is_written_is_what_is_read_on_another_machine(reference, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    given = GivenReference(file)
    assert given.mismatch(ORIGIN, [locate.local(data.weights(MODEL))]) is None
    found = given.kept()
    assert found.folder != reference.folder
    for number in range(WORKLOAD.chunks):
        for name in ("codes", "top", "nll"):
            ours, theirs = (getattr(each.window(number), name) for each in (found, reference))
            assert (ours == theirs).all()
    assert found.description["name"] == "hf fp32"
    assert "/home/someone" not in json.dumps(found.description)


def test_a_copy_of_the_weights_is_the_same_model(file, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(data.weights(MODEL), copy, copy_function=shutil.copyfile)
    assert GivenReference(file).mismatch(ORIGIN, [locate.local(copy)]) is None


def test_a_reference_of_something_else_is_one_sentence(file):
    given, ours = GivenReference(file), locate.local(data.weights(MODEL))
    others = {
        "is the reference of another text": replace(ORIGIN, text_sha256="other"),
        "has windows of 16 tokens, 3 of them, not 16 tokens, 4 of them": replace(
            ORIGIN, workload=Quality(n_ctx=16, chunks=4)
        ),
        "has no BOS in front of each window, and here it is BOS 2": replace(ORIGIN, bos=2),
        "its model's tokenizer makes other tokens of the text": replace(ORIGIN, ids_sha256="other"),
    }
    for sentence, origin in others.items():
        assert given.mismatch(origin, [ours]) == f"{file}: {sentence}"
    changed = replace(ours, fingerprint=ours.fingerprint[:-1] + "x")
    larger = replace(ours, format="gguf", tensors=ours.tensors * 2)
    for other in (changed, larger):
        assert given.mismatch(ORIGIN, [other]) == f"{file}: is the reference of {MODEL}, with other weights"


def test_a_file_that_exists_is_not_overwritten(reference, file):
    before = file.read_bytes()
    with pytest.raises(BadReference, match="exists already"):
        write_reference(file, reference, ORIGIN, MODEL, locate.local(data.weights(MODEL)))
    assert file.read_bytes() == before


def test_a_damaged_array_is_refused_and_not_kept(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            content = bytearray(source.read(name))
            if name == "codes.npy":
                content[-2] ^= 1
            target.writestr(name, bytes(content))
    for _ in range(2):
        with pytest.raises(BadReference, match=r"is damaged: the SHA-256 of codes\.npy is another"):
            GivenReference(changed).kept()


@pytest.mark.parametrize("change", [lambda a: a[:2], lambda a: a.astype(np.float32), lambda a: a * np.nan])
def test_arrays_that_no_reference_has_are_refused(change, reference, tmp_path, monkeypatch):
    np.save(reference.folder / "nll.npy", change(np.load(reference.folder / "nll.npy")))
    path = tmp_path / "other.zip"
    write_reference(path, reference, ORIGIN, MODEL, locate.local(data.weights(MODEL)))
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    with pytest.raises(BadReference, match="is damaged: arrays that no reference has"):
        GivenReference(path).kept()


def test_a_reference_larger_than_the_cache_says_how_many_windows_fit(tmp_path, monkeypatch):
    logits = np.zeros((WORKLOAD.positions, VOCABULARY), np.float32)
    window = kept_form(logits, [0] * WORKLOAD.positions)
    monkeypatch.setattr(bounds, "REFERENCE_BYTES", 2 * window.codes.nbytes)
    with (
        reference_scores.Writer(tmp_path, 3) as writer,
        pytest.raises(reference_scores.TooLarge, match="2 windows fit"),
    ):
        writer.add(0, window)


@pytest.mark.parametrize("at", [0, 100, -100])
def test_what_is_no_reference_is_one_sentence(at, file):
    raw = file.read_bytes()
    file.write_bytes(raw[:at])
    with pytest.raises(BadReference, match="is no reference that --export-reference wrote"):
        GivenReference(file)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(BadReference, match="no such file or directory"):
        GivenReference(tmp_path / "none.zip")


def test_weights_larger_than_the_free_memory_are_not_loaded():
    assert no_room(7_000_000_000, "bf16", 15_000_000_000) is None
    assert no_room(7_000_000_000, "bf16", 10_000_000_000) == (
        "in bf16 its weights take 14.0 GB, and 10.0 GB are free"
    )
    assert no_room(7_000_000_000, "bf16", None) is None
