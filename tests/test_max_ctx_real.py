"""The longest context of real stacks under budgets, against every context around the answer."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HARNESS, records_below
from gguf_holes import config as config_of
from gguf_holes import write_random

from harness.campaign import worker
from harness.campaign.memory_limit import MemoryLimit
from harness.stacks.adopted import Interpreter
from runners.protocol import Done, Request

# Little to compute and much to hold: 32 KiB of KV cache a token for 46 MB of weights.
WIDE = {"arch": "llama", "vocab_size": 512, "hidden_size": 512, "layers": 16}
WIDE |= {"intermediate_size": 256, "heads": 8, "kv_heads": 8}
# Grouped heads, a vocabulary whose logits are most of the compute buffer, and matrices that are tied.
GROUPED = {"arch": "qwen2", "vocab_size": 32768, "hidden_size": 512, "layers": 16, "tied": True}
GROUPED |= {"intermediate_size": 512, "heads": 8, "kv_heads": 4}
NO_CGROUPS = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'


@pytest.fixture
def found(real_config: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Searches one variant under a budget and returns the record's search, and the record."""

    def search(shape: dict[str, Any] | Path, budget: str, *before: str, **variant: Any) -> dict[str, Any]:
        source = {"weights": str(shape)} if isinstance(shape, Path) else {"shape": shape}
        path = real_config(variant, model={"name": "m", **source}, memory_budget=budget)
        command = [*before, HARNESS, "run", "--max-ctx", str(path), "--fresh", "--past-trained"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1700)
        assert ran.returncode == 0, ran.stderr
        record = max(records_below(tmp_path / "results"), key=lambda record: str(record["started_utc"]))
        return {"record": record, **record["search"]}

    return search


def fits(record: dict[str, Any], n_ctx: int, interpreter: Interpreter, folder: Path) -> bool:
    """Whether a context can be filled to its end under the record's budget: one job, and nothing clever."""
    workload = {"kind": "fit", "tokens": n_ctx, "fill": True, "most_s": 300.0}
    model = {"name": "m", "path": record["model"]["weights"]["file"], "shape": None}
    request = Request(
        job="fit",
        stack=record["stack"],
        device="cpu",
        model=model,
        options=record["options"] | {"n_ctx": n_ctx},
        workloads=[workload | {"prompt": record["workload"]["prompt"]}],
    )
    with MemoryLimit(record["memory_budget"]["bytes"], record["memory_budget"]["means"]) as memory_limit:
        *_, last = worker.run_job(request, interpreter, folder, 900, memory_limit=memory_limit)
    return isinstance(last, Done)


def is_the_longest(found: dict[str, Any], interpreter: Interpreter, folder: Path) -> None:
    """Of the contexts around it, those up to it fit and those above do not, but for one granule: the last few
    hundred KiB are another's from one process to the next."""
    n_ctx, granule = found["verified_n_ctx"], found["granule"]
    assert found["verified_by"] == "decode"
    assert fits(found["record"], n_ctx - granule, interpreter, folder)
    assert not fits(found["record"], n_ctx + 2 * granule, interpreter, folder)


def is_predicted(found: dict[str, Any], interpreter: Interpreter, folder: Path, probes: int) -> None:
    assert len(found["probes"]) <= probes
    assert abs(found["predicted_n_ctx"] - found["verified_n_ctx"]) <= found["granule"]
    is_the_longest(found, interpreter, folder)


@pytest.mark.parametrize(
    ("shape", "budget", "flash_attn"),
    [(WIDE, "140MiB", False), (GROUPED, "150MiB", True)],
    ids=["wide", "grouped"],
)
def test_llamacpp_is_predicted_exactly_and_takes_three_probes_at_most(
    found, llamacpp_interpreter, tmp_path, shape, budget, flash_attn
):
    answer = found(shape, budget, stack="llamacpp", flash_attn=flash_attn)
    is_predicted(answer, llamacpp_interpreter, tmp_path, probes=3)


LONG = pytest.mark.long("a search, and three loads to prove it: three to four minutes beside other tests")


@pytest.mark.parametrize(
    "kind",
    [
        "gemma3_text",
        "deepseek_v2",
        pytest.param("qwen3_moe", marks=LONG),
        pytest.param("falcon_h1", marks=LONG),
    ],
)
def test_windows_experts_latents_and_states_are_predicted_within_a_granule(
    found, llamacpp_interpreter, tmp_path, kind
):
    write_random(tmp_path / "m.gguf", config_of(kind))
    answer = found(tmp_path / "m.gguf", "250MiB", stack="llamacpp", quant="f16")
    is_predicted(answer, llamacpp_interpreter, tmp_path, probes=4)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, to hide the cgroups"
)
def test_without_a_cgroup_the_limit_is_of_what_is_allocated(found, llamacpp_interpreter, tmp_path):
    hidden = ("unshare", "-m", "sh", "-c", NO_CGROUPS, "sh")
    answer = found(WIDE, "240MiB", *hidden, stack="llamacpp")
    assert answer["record"]["memory_budget"]["means"] == "RLIMIT_DATA"
    is_predicted(answer, llamacpp_interpreter, tmp_path, probes=3)


def test_a_budget_below_the_weights_is_refused_before_anything_is_tried(found, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the weights take 47\.3 MB and .* 41\.9 MB"):
        found(WIDE, "40MiB", stack="llamacpp")
    (record,) = records_below(tmp_path / "results")
    assert (record["outcome"], record["search"]["probes"]) == ("refused", [])


@LONG
def test_a_static_cache_without_an_account_takes_five_probes_at_most(
    found, hf_interpreter, own_interpreter, tmp_path, monkeypatch
):
    # With AMX oneDNN's scratch is on no line over the context's length: on such a CPU it takes six.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    answer = found(WIDE, "420MiB", stack="hf", cache="static")
    assert len(answer["probes"]) <= 5
    is_the_longest(answer, own_interpreter("hf"), tmp_path)
