"""Models that are not dense, against llama.cpp itself: the types, names and dimensions of their tensors, the
memory of caches and states."""

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_holes
from gguf_holes import KINDS, write_hole
from test_gguf_types import NUMBERS, ROOT, types

from harness.base import data
from harness.models import gguf, gguf_model
from harness.stacks.adopted import Interpreter
from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.ggml_quants import QUANTS, model_bytes, quantized
from harness.theory.known_models import config_of
from harness.theory.memory import MIB, PADDING, Model

# The types of the tensors of each file, chosen without computing a value.
DRY_RUN = r"""
import json, re, sys
from pathlib import Path
from runners.llamacpp.weights import LOG, lib, quantize_params
line = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- .*type = +(\w+), size =.*?(?:\((\w+)\))?$")
for path in sorted(Path(sys.argv[1]).iterdir()):
    for quant, number in json.loads(sys.argv[2]).items():
        params, said = quantize_params(path, "q4_0", 1), []
        params.ftype, params.dry_run = number, True
        with LOG.listening(said.append):
            assert lib.llama_model_quantize(bytes(path), b"unused", params) == 0
        types = {found[1]: (found[3] or found[2]).lower() for found in map(line.match, said) if found}
        print(json.dumps([path.stem, quant, types]))
"""
# Why a file does not load, or what llama.cpp logs of its caches.
LOAD = r"""
import json, sys
from pathlib import Path
from runners.llamacpp.lib import LOG, lib
for path in sorted(Path(sys.argv[1]).iterdir()):
    said, found = [], {}
    with LOG.listening(said.append):
        params = lib.llama_model_default_params()
        params.use_extra_bufts = False
        model = lib.llama_model_load_from_file(bytes(path), params)
    if not model:
        print(json.dumps([path.stem, [line for line in said if "rror" in line]]))
        continue
    with LOG.listening(said.append):
        for tokens, sequences in json.loads(sys.argv[2])[path.stem]:
            del said[:]
            params = lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.n_ubatch = tokens * sequences, sequences, 512
            params.swa_full, params.flash_attn_type = False, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            context = lib.llama_init_from_model(model, params)
            assert context, said
            lib.llama_free(context)
            sizes = [line for line in said if " size = " in line and "seqs" in line]
            found[f"{tokens} x {sequences}"] = sizes
    lib.llama_model_free(model)
    print(json.dumps([path.stem, found]))
"""
# The key of mixtures to try with eight experts, which llama.cpp has rules for.
EIGHT = {
    "qwen3_moe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "granitemoehybrid": "num_local_experts",
}
SEQUENCES = 100  # as many states, so that their rounded sizes say more
_SIZE = re.compile(r"llama_(kv_cache|memory_recurrent): size = +([\d.]+) MiB")


def said(program: str, interpreter: Interpreter, *given: Any) -> list[Any]:
    """The JSON lines that it prints under llama.cpp's interpreter."""
    command = [interpreter.python, "-c", program, *given]
    with tempfile.TemporaryFile() as log:  # long
        ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        log.seek(max(0, log.tell() - 2000))
        assert ran.returncode == 0, log.read().decode()
    return [json.loads(line) for line in ran.stdout.splitlines()]


def varied(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Small models of a kind where the rules part: more layers, rows that 256 does not divide; eight experts,
    and as many keys as queries."""
    small = gguf_holes.config(kind)
    many: dict[str, Any] = {"num_hidden_layers": 17, "hidden_size": 288, "intermediate_size": 544}
    if kind == "deepseek_v2, lite":
        many["num_hidden_layers"] = 26  # which llama.cpp knows it by
    for key in ("layer_types", "hybrid_override_pattern"):
        if key in small:
            many[key] = (small[key] * 2)[:17]
    yield f"{kind} - many layers", gguf_holes.config(kind, **many)
    if key := EIGHT.get(kind, ""):
        yield f"{kind} - eight experts", gguf_holes.config(kind, **{key: 8, "num_key_value_heads": 8})


def differences(
    interpreter: Interpreter, folder: Path, configs: Mapping[str, Mapping[str, Any]], quants: Iterable[str]
) -> list[tuple[str, str, str, str | None, str | None]]:
    """Model, quant, tensor, our type and llama.cpp's, where these differ."""
    models = {name: write_hole(folder / f"{name}.gguf", config) for name, config in configs.items()}
    numbers = {quant: NUMBERS[quant] for quant in quants}
    found, lines = [], said(DRY_RUN, interpreter, folder, json.dumps(numbers))
    assert len(lines) == len(models) * len(numbers)
    for name, quant, chosen in lines:
        ours = types(quantized(models[name], quant))
        for tensor in ours.keys() | chosen.keys():
            if ours.get(tensor) != chosen.get(tensor):
                found.append((name, quant, tensor, ours.get(tensor), chosen.get(tensor)))
    return found


def test_every_tensor_of_every_kind_gets_the_type_that_llama_cpp_gives_it(llamacpp_interpreter, tmp_path):
    configs = dict(each for kind in KINDS for each in varied(kind))
    assert differences(llamacpp_interpreter, tmp_path, configs, NUMBERS) == []


def test_every_tensor_of_every_shipped_model_gets_the_type_that_llama_cpp_gives_it(
    llamacpp_interpreter: Interpreter, tmp_path: Path
):
    configs: dict[str, Any] = {}
    for name in data.model_names():
        config = config_of(name)
        configs[name] = config.get("text_config", config)
    assert differences(llamacpp_interpreter, tmp_path, configs, ["q4_k_m"]) == []


def test_a_file_describes_the_same_model_as_its_config(tmp_path: Path):
    for kind in KINDS:
        made = write_hole(tmp_path / "hole.gguf", gguf_holes.config(kind))
        read = gguf_model.decoder_of(gguf.read(tmp_path / "hole.gguf"))
        assert read is not None, kind
        assert decoder.parameters(read) == decoder.parameters(made), kind
        assert decoder.active_params(read) == decoder.active_params(made), kind
        assert [each.cache for each in read.layers()] == [each.cache for each in made.layers()], kind
        assert replace(read, runs=(), others=()) == replace(made, runs=(), others=()), kind
        for quant in QUANTS:
            assert model_bytes(read, quant) == model_bytes(made, quant), kind


def test_llama_cpp_finds_the_tensors_that_it_looks_for_and_no_others_and_keeps_as_much_of_a_token(
    llamacpp_interpreter: Interpreter, tmp_path: Path
):
    models = {kind: write_hole(tmp_path / f"{kind}.gguf", gguf_holes.config(kind)) for kind in KINDS}
    states = [kind for kind, model in models.items() if any(each.cache.state for each in model.layers())]
    wanted = {
        kind: [*((tokens, 1) for tokens in lengths(model)), *[(256, SEQUENCES)] * (kind in states)]
        for kind, model in models.items()
    }
    found = dict(said(LOAD, llamacpp_interpreter, tmp_path, json.dumps(wanted)))
    assert {kind for kind, logged in found.items() if isinstance(logged, list)} == set(), found
    got: dict[str, list[str]] = {}
    want: dict[str, list[str]] = {}
    for kind, model in models.items():
        held = [sizes(found[kind][f"{tokens} x 1"])["kv_cache"] for tokens in lengths(model)]
        got[kind] = [f"{size:.2f}" for size in held]
        want[kind] = [f"{(kept(model, tokens) - state_bytes(model)) / MIB:.2f}" for tokens in lengths(model)]
        if kind in states:
            got[kind].append(f"{sizes(found[kind][f'256 x {SEQUENCES}'])['memory_recurrent']:.2f}")
            want[kind].append(f"{SEQUENCES * state_bytes(model) / MIB:.2f}")
    assert got == want
    assert len(states) == 9


def lengths(model: Decoder) -> list[int]:
    """Contexts within windows and beyond."""
    return [4096, 32_768] if any(each.cache.window for each in model.layers()) else [4096]


def sizes(logged: list[str]) -> Counter[str]:
    """MiB of the caches, and of the states."""
    found: Counter[str] = Counter()
    for line in logged:
        if match := _SIZE.search(line):
            found[match[1]] += float(match[2])
    return found


def kept(model: Decoder, tokens: int) -> float:
    """In 16 bits, as llama.cpp does with passes of 512 tokens."""
    per_token = 2.0 * decoder.kv_elements_per_token(model)
    return Model(model, 0, 0, per_token).kv_bytes(tokens, room=512, pad=PADDING)


def state_bytes(model: Decoder) -> int:
    return 4 * sum(each.cache.state for each in model.layers())
