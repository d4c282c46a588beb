"""A stack's estimate of a context's memory against the real memory: real llama.cpp, and the fake."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import request_for

from harness.campaign import worker as campaign_worker
from harness.stacks.adopted import Interpreter
from harness.theory.decoder import dense_fields, kv_elements_per_token
from harness.theory.hf_config import SHAPES
from harness.theory.memory import LlamaCpp, Model
from runners.protocol import Done, Loaded, Phase, Request

PROMPT = list(range(1, 26))
MIB = 2**20
CLOSE = 4 * MIB  # variation of a process's own memory


@pytest.fixture
def tiny(harness, llamacpp_interpreter) -> Path:
    return Path(harness("env", "synth", "tiny-qwen2", "--quant", "q4_0").out.strip())


def request_of(stack: str, job: str, path: Path | None, workload: dict, **options: object) -> Request:
    given = {"n_ctx": 256} | ({"mmap": False} if stack == "llamacpp" else {})
    return request_for(stack, job, workload, path, **given | options)


def fit_of(stack: str, path: Path | None, n_ctx: int, fill: bool = True, **options: object) -> Request:
    workload = {"kind": "fit", "tokens": n_ctx, "fill": fill, "most_s": 60, "prompt": PROMPT}
    return request_of(stack, "fit", path, workload, **options | {"n_ctx": n_ctx})


def account_of(
    stack: str,
    interpreter: Interpreter,
    folder: Path,
    path: Path | None,
    contexts: list[int],
    **options: object,
) -> dict[str, Any]:
    request = request_of(stack, "account", path, {"kind": "account", "n_ctx": contexts}, **options)
    return campaign_worker.facts_of(campaign_worker.run_job(request, interpreter, folder, 600))


@pytest.mark.parametrize("flash_attn", [False, True])
def test_the_estimate_by_shape_is_near_what_llama_cpp_accounts_for(
    tiny, llamacpp_interpreter, tmp_path, flash_attn
):
    """All shipped models were within 3%; the tiny one has little but its buffers."""
    said = account_of(
        "llamacpp", llamacpp_interpreter, tmp_path, tiny, [8192, 32768], n_ubatch=512, flash_attn=flash_attn
    )
    shape = SHAPES["tiny-qwen2"]
    model = Model(shape, sum(said["model"].values()), 0, 2 * kv_elements_per_token(shape))
    for at in said["at"]:
        accounted = {part: sum(by_device.values()) for part, by_device in at["memory"].items()}
        on_gpu = LlamaCpp(True, flash_attn).parts(model, at["n_ctx"])
        assert on_gpu["kv"] == accounted["kv"]
        assert on_gpu["compute"] == pytest.approx(accounted["compute"], rel=0.1)
        touched = sum(at["touched"]["compute"].values()) + accounted["work"] + accounted["cells"]
        on_cpu = LlamaCpp(False, flash_attn).parts(model, at["n_ctx"])
        assert on_cpu["compute"] == pytest.approx(touched, rel=0.1)


def expected(said: dict, at: dict, which: str, process: str, without: tuple[str, ...] = ()) -> int:
    """The process, the weights, and the parts of one context but those `without`."""
    parts = sum(sum(sizes.values()) for part, sizes in at[which].items() if part not in without)
    return said["process"][process] + sum(said["model"].values()) + parts


def status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "VmData")}


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[], dict[str, int]]]:
    """The most that a process has had, looked at every few ms."""
    most, over = {"RssAnon": 0, "VmData": 0}, threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            with contextlib.suppress(OSError, KeyError):  # it has ended
                most.update({key: max(most[key], value) for key, value in status(pid).items()})

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: most
    finally:
        over.set()
        thread.join()


def really(request: Request, interpreter: Interpreter, folder: Path) -> tuple[dict, dict, dict, dict]:
    """Memory when loaded, and the most of it, its end included; the facts of Loaded and of Done."""
    worker = campaign_worker.Worker(request, interpreter, folder)
    with watched(worker.pid) as most:
        for event in worker.events(600):
            if isinstance(event, Loaded):
                loaded, facts = status(worker.pid), event.facts
            elif isinstance(event, Phase) and event.name == "finish":
                ended = status(worker.pid)
    assert isinstance(event, Done), event
    return loaded, {key: max(size, ended[key]) for key, size in most().items()}, facts, event.facts


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("n_ubatch", [128, 512])
def test_the_account_of_llama_cpp_is_what_loading_and_filling_take(
    tiny, llamacpp_interpreter, tmp_path, flash_attn, n_ubatch
):
    options = {"flash_attn": flash_attn, "n_ubatch": n_ubatch}
    contexts = [256, 1024, 4096]
    said = account_of("llamacpp", llamacpp_interpreter, tmp_path, tiny, contexts, **options)
    assert [at["n_ctx"] for at in said["at"]] == contexts
    for at in said["at"]:
        n_ctx = at["n_ctx"]
        request = fit_of("llamacpp", tiny, n_ctx, **options)
        loaded, most, facts, done = really(request, llamacpp_interpreter, tmp_path)
        assert done["held"] == n_ctx
        assert at["memory"]["kv"] == facts["memory"]["kv"]
        assert at["memory"]["compute"] == facts["memory"]["compute"]
        assert sum(said["model"].values()) == pytest.approx(
            sum(facts["memory"]["model"].values()), abs=MIB / 10
        )
        for which, process, kernel in (
            ("touched", "rss_anon_bytes", "RssAnon"),
            ("memory", "data_bytes", "VmData"),
        ):
            later = ("work", "compute") if kernel == "RssAnon" else ("work",)
            assert expected(said, at, which, process, later) == pytest.approx(loaded[kernel], abs=CLOSE)
            assert expected(said, at, which, process) == pytest.approx(most[kernel], abs=CLOSE)


def test_the_account_heeds_neither_the_option_nor_a_context_before(tiny, llamacpp_interpreter, tmp_path):
    both = account_of("llamacpp", llamacpp_interpreter, tmp_path, tiny, [131_072, 512], n_ctx=999)
    alone = account_of("llamacpp", llamacpp_interpreter, tmp_path, tiny, [512])
    assert both["at"][1] == alone["at"][0]
    assert both["process"]["rss_anon_bytes"] == pytest.approx(alone["process"]["rss_anon_bytes"], abs=MIB)
    assert both["granule"] == 256


def test_logits_that_nobody_asks_for_are_reserved_and_not_touched(
    harness, llamacpp_interpreter, tmp_path, job
):
    target = tmp_path / "wide.gguf"
    wide, made = dense_fields(SHAPES["tiny-qwen2"]) | {"vocab_size": 32_000}, str(tmp_path / "hf")
    model = {"name": "m", "path": None, "shape": wide}
    job(job="synthesize", model=model, options={"seed": 1, "threads": 1}, files={"target": made})
    job(job="convert", options={"dtype": "f16"}, files={"source": made, "target": str(target)})
    said = account_of("llamacpp", llamacpp_interpreter, tmp_path, target, [512])
    (at,) = said["at"]
    logits = 32_000 * 512 * 4
    assert at["memory"]["compute"]["CPU"] > logits
    assert at["touched"]["compute"]["CPU"] < logits / 2
    _, most, _, _ = really(fit_of("llamacpp", target, 512), llamacpp_interpreter, tmp_path)
    assert expected(said, at, "touched", "rss_anon_bytes") == pytest.approx(most["RssAnon"], abs=CLOSE)


@pytest.mark.parametrize("lazily", [False, True])
def test_the_fake_takes_what_it_accounts_for(fake_interpreter, tmp_path, lazily):
    options = {"kv_bytes_per_token": 20_000, "lazily": lazily, "prefill_ms": 20.0, "B_ms": 0.1}
    said = account_of("fake", fake_interpreter, tmp_path, None, [1024, 4096], **options)
    at = said["at"][1]
    loaded, most, _, _ = really(fit_of("fake", None, 4096, **options), fake_interpreter, tmp_path)
    kv = 4096 * 20_000
    assert at["memory"]["kv"] == {"CPU": kv}
    assert expected(said, at, "touched", "rss_anon_bytes") == pytest.approx(most["RssAnon"], abs=CLOSE)
    assert most["RssAnon"] - loaded["RssAnon"] == pytest.approx(kv if lazily else 0, abs=CLOSE)
    assert expected(said, at, "memory", "data_bytes") == pytest.approx(most["VmData"], abs=CLOSE)


def test_the_fake_s_account_is_off_by_what_it_was_asked_to_be(fake_interpreter, tmp_path):
    options = {"kv_bytes_per_token": 1000, "account_off_bytes": -5000}
    said = account_of("fake", fake_interpreter, tmp_path, None, [1, 256], **options)
    assert [at["memory"]["kv"]["CPU"] for at in said["at"]] == [0, 251_000]


def test_memory_that_the_fake_cannot_have_is_out_of_memory(fake_interpreter, tmp_path, worker):
    request = fit_of("fake", None, 2**40, fill=False, kv_bytes_per_token=2**20)
    last = worker(replace(request, workloads=[request.workloads[0] | {"tokens": 256}]), fake_interpreter)[-1]
    assert last.outcome == "oom"
    assert not isinstance(last, Phase)
