"""Files that others wrote, or can write next to ours: checkpoints, tokenizers, locks, the cache."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import built
from test_hf import request_of, said
from test_weights import write_checkpoint, write_tokenizer

from harness.base.files import CacheError, LockError, cache_folder, exclusive, made, shared_folder
from harness.campaign.device_lock import DeviceBusy, device_lock, is_busy
from harness.campaign.tokenized_text import tokenized
from harness.models import fingerprints, locate
from harness.models.locate import WeightsError
from harness.stacks import build
from harness.stacks.header import stacks
from runners.weights.safetensors import staged

# --- what is loaded -----------------------------------------------------------------------------------------

# Files that a library may prefer to the checked ones: pickles, other safetensors, a LoRA.
OTHERS = (
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "gptq_model-4bit-128g.safetensors"),
    *("autogptq_model.safetensors", "consolidated.safetensors", "adapter_config.json"),
    *("adapter_model.safetensors", "model.safetensors.index.json", "generation_config.json"),
)


def with_others(folder: Path) -> Path:
    for name in OTHERS:
        (folder / name).write_bytes(b"other weights")
    return folder


def test_of_a_folder_only_the_checked_files_are_staged(tmp_path):
    source = with_others(write_checkpoint(tmp_path / "mine"))
    (source / "modeling_mine.py").write_text("LAYERS = 2")
    with staged(source) as folder:
        assert folder.name == "mine"
        names = ("config.json", "model.safetensors", "modeling_mine.py")
        found = {path.name: path.resolve() for path in folder.iterdir()}
        assert found == {name: source / name for name in names}
    assert not folder.exists()
    assert (source / "model.safetensors").exists()


def test_of_a_sharded_checkpoint_the_shards_of_its_index_are_staged(tmp_path):
    source = with_others(write_checkpoint(tmp_path / "mine"))
    shard, index = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
    (source / "model.safetensors").rename(source / shard)
    (source / index).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with staged(source) as folder:
        assert {path.name for path in folder.iterdir()} == {"config.json", shard, index}


@pytest.mark.parametrize(
    ("stack", "format", "options"),
    [
        ("hf", None, {}),
        ("bnb", None, {"quant": "nf4"}),
        ("gptq", "gptq", {"kernel": "torch"}),
        ("autoawq", "awq", {"kernel": "torch"}),
        ("gptqm", "gptq", {"kernel": "torch"}),
    ],
)
def test_other_weights_beside_the_checked_ones_are_not_loaded(
    worker, checkpoint, packed, tmp_path, stack, format, options
):
    source = packed("tiny-qwen2", format) if format else checkpoint("tiny-qwen2")
    folder = with_others(shutil.copytree(source, tmp_path / "beside"))
    (alone, ids, _), (beside, ids_beside, _) = (
        said(worker(request_of(path, stack, **options), built(stack))) for path in (source, folder)
    )
    assert ids_beside == ids
    assert beside["bytes_by_type"] == alone["bytes_by_type"]


def replace_values(path: Path) -> None:
    """With other weights of the same header, size and modification time."""
    content, status = bytearray(path.read_bytes()), path.stat()
    content[-1] ^= 1
    (new := path.with_name("new")).write_bytes(content)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_other_values_of_equal_size_and_time_are_another_fingerprint(tmp_path, name):
    folder = write_checkpoint(tmp_path)
    write_tokenizer(folder)
    before = locate.local(folder).fingerprint
    replace_values(folder / name)
    assert locate.local(folder).fingerprint.rpartition("-")[0] == before.rpartition("-")[0]
    assert locate.local(folder).fingerprint != before


def holes(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_fingerprint_reads_a_bounded_part(tmp_path):
    assert fingerprints.sampled([holes(tmp_path / "a", 1 << 40)])  # all of it would take minutes


@pytest.mark.parametrize("shard", [0, 1])
def test_a_fingerprint_samples_every_shard(tmp_path, shard):
    size = 256 << 20
    shards = [holes(tmp_path / name, size) for name in "ab"]
    before = fingerprints.sampled(shards)
    replaced = holes(tmp_path / "replaced", size)
    with replaced.open("r+b") as file:  # a stretch of three 64ths, which holds a place for sure
        os.pwrite(file.fileno(), b"x" * (3 * 2 * size // fingerprints.PIECES), size // 2)
    replaced.replace(shards[shard])
    assert fingerprints.sampled(shards) != before


# --- tokenizers ---------------------------------------------------------------------------------------------


def changed_tokenizer(folder: Path, **changed: object) -> Path:
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return path


def test_padding_and_truncation_of_a_tokenizer_are_not_applied(tmp_path):
    plain = tokenized(changed_tokenizer(tmp_path), "each waits for every token", 10).ids
    padding = {"strategy": {"Fixed": 50_000_000}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    odd = changed_tokenizer(tmp_path, padding=padding, truncation=truncation)
    assert tokenized(odd, "each waits for every token", 10).ids == plain
    assert len(plain) > 1


@pytest.mark.slow("takes 2 GiB of memory")
def test_a_tokenizer_that_takes_all_memory_is_one_sentence(tmp_path):
    """Each letter becomes a megabyte, and the bytes of that again."""
    long = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * (1 << 20)}
    path = changed_tokenizer(tmp_path, normalizer={"type": "Sequence", "normalizers": [long, long]})
    with pytest.raises(WeightsError, match=r"tokenizer\.json: .*") as told:
        tokenized(path, "each waits", 10)
    assert "\n" not in str(told.value)


def test_a_tokenizer_that_is_a_pipe_or_a_device_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(WeightsError, match="is not a regular file"):
            tokenized(tmp_path / name, "each waits", 10)


# --- locks and the cache ------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The folder of locks that all users share, of this test alone."""
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("HARNESS_LOCKS", str(folder))
    return folder


@pytest.fixture
def public():
    """A folder that every user can reach and write; pytest's are for one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("a private file")
    yield path
    assert path.read_text() == "a private file"


def test_campaigns_of_two_caches_do_not_measure_on_one_device_at_once(shared, tmp_path, monkeypatch):
    with device_lock("cpu", wait=False, say=print):
        monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
        assert is_busy("cpu")
        with pytest.raises(DeviceBusy, match=rf"process {os.getpid()}\) is measuring on cpu"):
            device_lock("cpu", wait=False, say=print).__enter__()
        with device_lock("GPU-1", wait=False, say=print):
            pass
        with device_lock("cpu", wait=False, say=print, measures=False):  # the fake's time is virtual
            pass
    assert not is_busy("cpu")


def test_a_campaign_of_the_fake_stack_alone_does_not_lock_the_machine(shared, harness, config):
    assert harness("run", config({"B_ms": 2.0})).code == 0
    assert not list(shared.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_the_locks_of_the_machine_are_for_every_user(public, monkeypatch):
    monkeypatch.setenv("HARNESS_LOCKS", str(public))
    with device_lock("cpu", wait=False, say=print):
        pass
    assert stat.S_IMODE((public / "harness-cpu.lock").stat().st_mode) == 0o666
    code = (
        "import os\n"
        "from harness.campaign.device_lock import DeviceBusy, device_lock\n"
        "os.setuid(65534)\n"
        "try:\n    device_lock('cpu', False, print).__enter__(); print('locked')\n"
        "except DeviceBusy:\n    print('busy')\n"
    )
    variables = os.environ | {"HARNESS_CACHE": str(public / "of nobody")}

    def other() -> str:
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, capture_output=True, text=True, env=variables)
        return ran.stdout.strip() or ran.stderr

    assert other() == "locked"
    with device_lock("cpu", wait=False, say=print):
        assert other() == "busy"


def test_a_folder_for_the_locks_of_the_machine_is_writable_for_all(tmp_path, monkeypatch):
    monkeypatch.delenv("HARNESS_LOCKS")
    assert str(shared_folder()) in ("/run/lock", "/tmp")
    (tmp_path / "private").mkdir(mode=0o755)
    for folder in ("private", "missing"):
        monkeypatch.setenv("HARNESS_LOCKS", str(tmp_path / folder))
        with pytest.raises(LockError, match="no folder that every user can write"):
            shared_folder()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
@pytest.mark.parametrize("of", ["cache", "machine"])
def test_a_lock_that_is_a_link_is_refused(shared, victim, tmp_path, monkeypatch, link, of):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    of_cache = made(tmp_path / "cache" / "locks") / "cpu.lock"
    link(shared / "harness-cpu.lock" if of == "machine" else of_cache, victim)
    with pytest.raises(LockError, match=r"cpu\.lock: cannot be used as a lock: it is a (symbolic|hard) link"):
        device_lock("cpu", wait=False, say=print).__enter__()
    link(made(tmp_path / "cache" / "weights") / "x.lock", victim)
    with pytest.raises(CacheError, match=r"x\.lock: cannot be used .*; set HARNESS_CACHE"):
        exclusive(tmp_path / "cache" / "weights" / "x.lock").__enter__()


def test_a_pipe_in_place_of_a_lock_is_not_waited_for(shared):
    os.mkfifo(shared / "harness-cpu.lock")
    is_busy("cpu")
    with pytest.raises(LockError, match="it is not a regular file"):
        device_lock("cpu", wait=False, say=print).__enter__()


def test_a_new_cache_is_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "a" / "cache"))
    made(cache_folder() / "weights" / "x")
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o733])
def test_a_cache_that_other_users_can_write_in_is_refused(harness, config, tmp_path, mode):
    (folder := tmp_path / "open").mkdir()
    folder.chmod(mode)
    ran = harness("run", config({"B_ms": 2.0}), HARNESS_CACHE=str(folder))
    assert ran.code == 2
    assert f"open: other users can write in it (mode {mode:o}); chmod go-w, or set HARNESS_CACHE" in ran.err
    assert not list(folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a group away, which needs root")
@pytest.mark.parametrize("group", ["own", "others"])
def test_a_cache_for_a_group_is_refused_unless_that_is_its_owner_alone(tmp_path, monkeypatch, group):
    monkeypatch.setenv("HARNESS_CACHE", str(folder := tmp_path / "cache"))
    folder.mkdir()
    os.chown(folder, -1, {"own": os.getgid(), "others": 65534}[group])
    folder.chmod(0o775)
    if group == "own":
        assert cache_folder() == folder
    else:
        with pytest.raises(CacheError, match=r"other users can write in it \(mode 775\)"):
            cache_folder()


@pytest.mark.parametrize("name", ["envs", "envs/{}"])
def test_an_environment_that_other_users_could_write_is_not_run(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HARNESS_CACHE", str(folder := tmp_path / "cache"))
    place = build.folder_of(environment := next(iter(stacks()["llamacpp"].environments.values())))
    place.mkdir(parents=True)
    (folder / name.format(place.name)).chmod(0o777)
    folder.chmod(0o700)  # nobody gets there
    assert build.folder_of(environment) == place
    folder.chmod(0o755)
    with pytest.raises(CacheError, match="other users can write in it"):
        build.folder_of(environment)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away, which needs root")
def test_a_cache_of_another_user_is_refused(harness, config, tmp_path):
    (folder := tmp_path / "theirs").mkdir()
    os.chown(folder, 65534, -1)
    ran = harness("run", config({"B_ms": 2.0}), HARNESS_CACHE=str(folder))
    assert ran.code == 2
    assert "theirs: belongs to another user (uid 65534); set HARNESS_CACHE to a folder of your own" in ran.err
    assert not list(folder.iterdir())
