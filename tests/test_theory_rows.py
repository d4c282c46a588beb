"""Rows of the theory against numbers counted by hand, token by token, whatever is asked for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.theory import floors, ggml_quants, rows
from harness.theory.decoder import Decoder, dense, dense_like
from harness.theory.floors import PUBLISHED, SI, Ceiling, Demand, Reach
from harness.theory.hf_config import SHAPES
from harness.theory.machines import MACHINES, Figure, Machine
from harness.theory.memory_fit import Form
from harness.theory.rows import Ask
from harness.theory.tensors import Tensor

# A model with GQA, its queries wider than its hidden size, and its memory by hand: queries of 4 x 32, keys
# and values of 2 x 32.
MODEL = dense(
    "llama", 1000, hidden_size=64, layers=3, intermediate_size=192, heads=4, kv_heads=2, head_dim=32
)
LAYERS = 3 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64
LM_HEAD = 1000 * 64
ACTIVE = LAYERS + LM_HEAD
KV_ELEMENTS = 3 * (64 + 64)
ATTENTION = 3 * (2 * 128 + 2 * 128)  # of one query and one cached token: q . k, and its share of p . v
BANDWIDTH, RATES = 1e9, {"fast": 1e12, "slow": 1.5e9}

EMBEDDING, OUTPUT, IN_LAYERS = 52_500, 70_000, 90_000 + 256 + 64
STORED = (
    Tensor("token_embd.weight", "q6_k", (1000, 64), EMBEDDING),
    Tensor("blk.0.ffn_up.weight", "q4_0", (2500, 64), 90_000),
    Tensor("blk.0.attn_norm.weight", "f32", (64,), 256),
    Tensor("rope_freqs.weight", "f32", (16,), 64),
    Tensor("output.weight", "q8_0", (1000, 64), OUTPUT),
)


def box(memory_bytes: float = 1e12) -> Machine:
    rates = {name: Figure(value, "made up") for name, value in RATES.items()}
    return Machine(
        "box", Figure(memory_bytes, "made up"), Figure(BANDWIDTH, "made up"), rates, "fast", (8, 9)
    )


def row(form: Form, shape: Decoder = MODEL, machine: Machine | None = None, **asked: Any) -> dict[str, Any]:
    return rows.row("mine", shape, form, "box", machine or box(), Ask(**{"units": SI} | asked))


def by_hand(form: Form, kv_bits: float, window: int | None) -> Demand:
    layers, lm_head, embedding = float(IN_LAYERS), float(OUTPUT), float(EMBEDDING)
    if form.bits is not None:
        layers, lm_head = LAYERS * form.bits / 8, LM_HEAD * form.bits / 8
        embedding = lm_head
    kv = KV_ELEMENTS * kv_bits / 8
    return Demand(LAYERS, LM_HEAD, layers, lm_head, embedding, (Reach(kv, ATTENTION, window),))


# --- token by token -----------------------------------------------------------------------------------------


def seen(asked: Demand, n: int, kv_read: str, length: int | None) -> int:
    """Tokens that a step attends to, counted."""
    cached = list(range(length if kv_read == "full" and length else n))
    for window in (asked.reaches[0].window, length if kv_read == "window" else None):
        cached = cached[-window:] if window else cached
    return len(cached)


def decode_s(
    asked: Demand, ceiling: Ceiling, n: int, kv_read: str, length: int | None
) -> tuple[float, float]:
    """Reading and computing."""
    tokens = moved = seen(asked, n, kv_read, length)
    if kv_read == "copied":  # read by attention, read and written by the copy
        moved = tokens + tokens + tokens
    while kv_read == "padded256" and moved % 256:
        moved += 1
    read = asked.layer_bytes + asked.lm_head_bytes + asked.kv_bytes_per_token * moved
    attention = math.fsum(reach.flops for reach in asked.reaches)
    flops = 2 * asked.layer_params + 2 * asked.lm_head_params + attention * tokens
    return read / ceiling.bytes_per_s, flops / ceiling.flops


def prefill_s(
    asked: Demand, ceiling: Ceiling, n: int, lm_head: str, kv_block: int | None, chunk: int | None
) -> float:
    def reach(of: Reach, token: int) -> set[int]:
        first = max(1, token + 1 - (of.window or n))
        if of.window and of.chunked:
            first = max(first, (token - 1) // of.window * of.window + 1)
        return set(range(first, token + 1))

    def cut(tokens: Sequence[int], size: int | None) -> list[Sequence[int]]:
        return [tokens[i : i + (size or n)] for i in range(0, len(tokens), size or n)]

    seconds = 0.0
    for tokens in cut(range(1, n + 1), chunk):
        heads = [token for token in tokens if lm_head == "every" or token == n]
        read = asked.layer_bytes + asked.lm_head_bytes * bool(heads) + 2 * asked.state_bytes
        flops = 2 * asked.layer_params * len(tokens) + 2 * asked.lm_head_params * len(heads)
        for of in asked.reaches:
            for block in cut(tokens, kv_block):
                read += of.kv_bytes * len(set().union(*(reach(of, token) for token in block)))
            flops += of.flops * sum(len(reach(of, token)) for token in tokens)
        seconds += max(read / ceiling.bytes_per_s, flops / ceiling.flops)
    return seconds


DEMANDS = st.builds(
    Demand,
    layer_params=st.integers(1, 1000),
    lm_head_params=st.integers(1, 300),
    layer_bytes=st.floats(1, 2000),
    lm_head_bytes=st.floats(1, 600),
    embedding_bytes=st.just(0),
    reaches=st.lists(
        st.builds(
            Reach, st.floats(0.1, 50), st.floats(0.1, 50), st.none() | st.integers(1, 30), st.booleans()
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    state_bytes=st.sampled_from([0.0, 700.0]),
)


@given(
    asked=DEMANDS,
    ceiling=st.builds(Ceiling, st.floats(1, 10), st.floats(1, 500)),
    n=st.integers(1, 60),
    lm_head=st.sampled_from(["every", "last"]),
    kv_block=st.none() | st.integers(1, 64),
    chunk=st.none() | st.integers(1, 99),
)
def test_prefill_takes_what_a_count_token_by_token_gives(
    asked: Demand, ceiling: Ceiling, n: int, lm_head: str, kv_block: int | None, chunk: int | None
) -> None:
    counted = prefill_s(asked, ceiling, n, lm_head, kv_block, chunk)
    assert floors.prefill_floor_s(asked, ceiling, n, lm_head, kv_block, chunk) == pytest.approx(counted)


FORMS = [Form("bits", 16), Form("bits", 4.5), Form("types", tensors=STORED)]


@pytest.mark.parametrize("bound", ["memory", "compute"])
@pytest.mark.parametrize("kv_read", ["grows", "padded256", "full", "copied", "window"])
@given(
    form=st.sampled_from(FORMS),
    context=st.integers(1, 900),
    window=st.none() | st.integers(1, 1200),
    length=st.integers(1, 900),
    kv_bits=st.sampled_from([16, 8, 4.5]),
    kv_block=st.none() | st.integers(1, 7),
    prompt=st.integers(1, 60),
)
def test_a_row_says_what_a_count_token_by_token_gives_whatever_is_asked(
    kv_read: str,
    bound: str,
    form: Form,
    context: int,
    window: int | None,
    length: int,
    kv_bits: float,
    kv_block: int | None,
    prompt: int,
) -> None:
    asked: dict[str, Any] = {
        "kv_bits": kv_bits,
        "kv_read": kv_read,
        "length": {"full": context + 100, "window": length}.get(kv_read),
        "context": context,
        "kv_block": kv_block,
        "prompt": prompt,
        "chunks": [1, 9, 100],
        "rate": "fast" if bound == "memory" else "slow",
    }
    demanded, ceiling = by_hand(form, kv_bits, window), Ceiling(BANDWIDTH, RATES[asked["rate"]])
    reading_s, computing_s = decode_s(demanded, ceiling, context, kv_read, asked["length"])
    assume((reading_s < computing_s) == (bound == "compute"))
    counted = counted_row(demanded, ceiling, asked)
    found = row(form, dense_like(MODEL, window=window), **asked)
    assert {key: found[key] for key in counted} == counted


def counted_row(asked: Demand, ceiling: Ceiling, ask: dict[str, Any]) -> dict[str, Any]:
    cache = ask["kv_read"], ask["length"]
    B = asked.layer_bytes + asked.lm_head_bytes
    added: float | None = asked.kv_bytes_per_token  # by one more token of context
    if ask["kv_read"] == "full":  # its bytes are there from the first token on, and no more come
        B, added = B + asked.kv_bytes_per_token * seen(asked, 1, *cache), None
    elif ask["kv_read"] == "copied":
        added = 3 * asked.kv_bytes_per_token

    def ms(lm_head: str, chunk: int | None = None) -> float:
        return 1e3 * prefill_s(asked, ceiling, ask["prompt"], lm_head, ask["kv_block"], chunk)

    return {
        "kv_bytes_per_token": asked.kv_bytes_per_token,
        "model_bytes": asked.layer_bytes + asked.lm_head_bytes + asked.embedding_bytes,
        "B_ms": pytest.approx(1e3 * B / BANDWIDTH),
        "W_tokens_per_ms": added and pytest.approx(BANDWIDTH / added / 1e3),
        "latency_ms_at_context": pytest.approx(1e3 * max(decode_s(asked, ceiling, ask["context"], *cache))),
        "prefill_ms": pytest.approx({lm_head: ms(lm_head) for lm_head in ("every", "last")}),
        "chunked_prefill": [
            pytest.approx({"chunk": chunk, "ms": ms("last", chunk), "ratio": ms("last", chunk) / ms("last")})
            for chunk in ask["chunks"]
        ],
    }


# --- what follows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_read", ["grows", "copied"])
def test_a_step_bound_by_computing_counts_attention(kv_read):
    asked, slow = by_hand(Form("", 16), 16, None), Ceiling(1e18, 1e6)
    computing = 2 * ACTIVE + ATTENTION * 1000
    assert floors.decode_floor_s(asked, slow, 1000, kv_read) == pytest.approx(computing / 1e6)


@pytest.mark.parametrize(("rate", "bound"), [("fast", "memory"), ("slow", "compute")])
def test_a_step_is_as_fast_as_the_slower_of_reading_and_computing(rate, bound):
    said = row(Form("types", tensors=STORED), rate=rate)
    reading_s, computing_s = (IN_LAYERS + OUTPUT) / BANDWIDTH, 2 * ACTIVE / RATES[rate]
    assert said["bound"] == bound
    assert (said["B_ms"], said["compute_ms"]) == pytest.approx((reading_s * 1e3, computing_s * 1e3))
    assert said["tokens_per_s"] == pytest.approx(1 / max(reading_s, computing_s))
    assert said["flop_per_byte"] == pytest.approx(2 * ACTIVE / (IN_LAYERS + OUTPUT))
    assert said["compute_bound_batch"] * computing_s == pytest.approx(reading_s)  # so many compute as long


@pytest.mark.parametrize("tied", [False, True])
def test_ideally_all_of_the_memory_is_weights_without_the_embedding_and_cache(tied):
    memory, token = 1_000_000, 2 * KV_ELEMENTS
    ideal = row(Form("", 8), replace(MODEL, tied=tied), box(memory))["fits"]["ideal"]
    longest = ideal["longest_uncapped"]
    assert ACTIVE + longest * token <= memory < ACTIVE + (longest + 1) * token
    assert ideal["longest"] == min(longest, MODEL.context)


def test_a_stack_takes_more_than_the_ideal_and_has_less_of_the_memory():
    said = row(Form("16 bits", 16), SHAPES["qwen1.5-7b"], MACHINES["rtx-4090"])
    fits = said["fits"]
    assert fits["llama.cpp"]["need_bytes"] > fits["ideal"]["need_bytes"]
    assert fits["transformers"]["need_bytes"] > fits["ideal"]["need_bytes"]
    for stack in ("llama.cpp", "llama.cpp flash_attn", "transformers"):
        left = fits[stack]["need_bytes"] + fits[stack]["spare_bytes"]
        assert left == pytest.approx(said["memory_bytes"] - said["reserve_bytes"])


def test_weights_have_the_stacks_that_load_them():
    card = MACHINES["rtx-4090"]
    quantized = ggml_quants.quantized(MODEL, "q8_0")
    packed = tuple(replace(t, name=t.name.replace("blk", "layers"), type="i32") for t in quantized)
    whole = ggml_quants.quantized(MODEL, "bf16")
    llama_cpp, hf = {"llama.cpp", "llama.cpp flash_attn"}, {"transformers"}
    for form, stacks in (
        (Form("8 bits", 8), llama_cpp | hf),
        (Form("5 bits", 5), llama_cpp),
        (Form("q8_0", tensors=quantized), llama_cpp),
        (Form("bf16", tensors=whole), llama_cpp | hf),
        (Form("gptq-int4", tensors=packed), hf),
    ):
        fits = row(form, machine=card)["fits"]
        assert {stack for stack, fit in fits.items() if fit} - {"ideal"} == stacks


def test_a_tied_embedding_is_streamed_as_the_lm_head_and_a_copy_of_it_is_not():
    untied = floors.demand_of_tensors(MODEL, STORED)
    assert untied == by_hand(Form("", tensors=STORED), 16, None)
    tied = replace(MODEL, tied=True)
    for stored in (STORED, STORED[:-1]):
        expected = replace(untied, lm_head_bytes=EMBEDDING, embedding_bytes=0)
        assert floors.demand_of_tensors(tied, stored) == expected
        said = row(Form("", tensors=stored), tied)
        assert said["model_bytes"] == said["weight_bytes_per_token"] == IN_LAYERS + EMBEDDING
        assert said["flop_per_byte"] == pytest.approx(2 * ACTIVE / (IN_LAYERS + EMBEDDING))


# --- the command --------------------------------------------------------------------------------------------


def test_every_option_reaches_the_row(harness):
    name, card = "mistral-7b-v0.1", "rtx-4090"
    given = "--quant q4_k_m --units published --kv q8_0 --kv-read window --length 1000 --kv-block 1"
    given += " --context 3000 --prompt 700 --chunk 300 50 --rate fp16-tensor"
    given += " --acceptance 0.7 --draft-length 6 --draft-cost 0.2"
    form = Form("q4_k_m", tensors=ggml_quants.quantized(SHAPES[name], "q4_k_m"))
    asked: dict[str, Any] = {"kv_bits": 8.5, "kv_read": "window", "length": 1000, "kv_block": 1}
    asked |= {"context": 3000, "prompt": 700, "chunks": [300, 50], "rate": "fp16-tensor"}
    asked |= {"speculation": (0.7, 6, 0.2)}
    expected = rows.row(name, SHAPES[name], form, card, MACHINES[card], Ask(PUBLISHED, **asked))
    assert harness("theory", name, "--machine", card, *given.split(), "--json").json == [expected]
    assert expected["speculative_speedup"] == pytest.approx(sum(0.7**i for i in range(7)) / (6 * 0.2 + 1))
    plain = Ask(PUBLISHED)
    for option in asked:  # and none of them is without effect here
        other = asked | {option: 999 if option == "length" else getattr(plain, option)}
        assert rows.row(name, SHAPES[name], form, card, MACHINES[card], Ask(PUBLISHED, **other)) != expected


def test_published_units_take_the_types_of_the_published_files(harness):
    asked = ("theory", "qwen1.5-1.8b", "--quant", "q2_k", "--json", "--units")
    ((theirs,), (today,)) = (harness(*asked, units).json for units in ("published", "si"))
    assert f"{theirs['model_bytes'] / 2**20:.2f}" == "817.81"
    assert theirs["bytes_by_type"].keys() - today["bytes_by_type"].keys() == {"q4_1"}
    assert today["model_bytes"] < theirs["model_bytes"]


def test_a_name_is_answered_without_what_takes_longer_to_import():
    """Of a machine without published records of the model, which name their stack by its header."""
    script = (
        "import json, sys; from harness.cli import main; "
        "code = main(['theory', 'qwen1.5-7b', '--machine', 'rtx-3090', '--json']); "
        "print(json.dumps(list(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    imported = set(json.loads(ran.stderr))
    assert json.loads(ran.stdout)[0]["model"] == "qwen1.5-7b"
    assert "harness.theory.rows" in imported
    assert not imported & {"pydantic", "yaml", "pyarrow", "plotly", "rich", "numpy", "psutil"}
