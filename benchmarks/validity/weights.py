"""What does check-weights find at four bits, and when does it cry wolf? Real stacks on small models.

A fault is put into a checkpoint, which then goes through the stack's own pipeline (converted, quantized,
packed, loaded) and is decoded there: its logits are those of a stack with that fault in its kernels, whatever
its weights. They are compared with the sound variant's own weights, dequantized and run by transformers in
float32, and, as before, with the 16-bit model. Each is judged by the verdict of the product.

The values of the faulty file are held against the sound checkpoint as well, tensor by tensor, as are its
settings: that finds a fault in the file, which both sides of the first comparison would share.

    .venv/bin/python benchmarks/validity/weights.py [--quants q8_0 q4_0 q2_k nf4 gptq] [--layers 12]
    .venv/bin/python benchmarks/validity/weights.py --sound --seeds 10 --quants f16 q8_0 q4_k_m q4_0 int8 nf4
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.analysis import agreement, own_weights
from harness.campaign import worker
from harness.models import layout, locate
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from harness.theory.decoder import Decoder, dense, dense_fields, dense_like
from runners.protocol import Request

# Grouped-query attention with biases, as Qwen2; the window is that of a Mistral of the same sizes.
SHAPE = dense(
    "qwen2", 512, 256, 12, 512, 8, 2, 32, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6, context=32_768
)
WINDOW = 128
WINDOWED = dense_like(SHAPE, arch="llama", qkv_bias=False, window=WINDOW)
PROMPT, DEPTH = 25, 300
QUANTS = ("q8_0", "q4_0", "q2_k", "nf4", "gptq")
DEMO = ("f16", "q8_0", "q4_k_m", "q4_0", "hf-bf16", "int8", "nf4")  # of make demo and demo-all
STACK = {"nf4": "bnb", "int8": "bnb", "gptq": "gptqm", "hf-bf16": "hf"}  # else llamacpp

Change = Callable[[str, NDArray[np.float32]], NDArray[np.float32] | None]


@dataclass(frozen=True)
class Fault:
    """`tensors`: the changed values of a tensor by its name, or null; `config`: changed keys of
    config.json."""

    name: str
    tensors: Change | None = None
    config: dict[str, Any] | None = None
    shape: Decoder | None = None
    """another model to put it into"""


def faults(shape: Decoder) -> Iterator[Fault]:
    """The faults of the audit, of q and k and of the MLP in the first, the middle and the last layer."""
    last, d = shape.count - 1, shape.head_dim

    def of(layers: Sequence[int], names: Sequence[str], change: Callable[[Any], Any]) -> Change:
        wanted = {f"model.layers.{i}.{name}" for i in layers for name in names}
        return lambda name, values: change(values) if name in wanted else None

    def by_heads(values: Any) -> Any:  # the order of rows that the other convention of rotation has
        return values.reshape(-1, 2, d // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    def reversed_heads(values: Any) -> Any:
        return values.reshape(-1, d, *values.shape[1:])[::-1].reshape(values.shape)

    def shuffled(values: Any) -> Any:
        return values[np.random.default_rng(0).permutation(len(values))]

    everywhere = range(shape.count)
    qk = [f"self_attn.{p}_proj.{e}" for p in "qk" for e in ("weight", "bias")]
    kv = [f"self_attn.{p}_proj.{e}" for p in "kv" for e in ("weight", "bias")]
    biases = [f"self_attn.{p}_proj.bias" for p in "qkv"]
    into_residual = ["self_attn.o_proj.weight", "mlp.down_proj.weight"]
    yield Fault("rope base 1e4 for 1e6", config={"rope_theta": 1e4})
    yield Fault("no rope", config={"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 9e5}})
    for where, layer in (("first", 0), ("middle", shape.count // 2), ("last", last)):
        yield Fault(f"q/k permuted, {where} layer", of([layer], qk, by_heads))
    yield Fault("q/k permuted, all layers", of(everywhere, qk, by_heads))
    for where, layer in (("first", 0), ("middle", shape.count // 2), ("last", last)):
        yield Fault(f"MLP scrambled, {where} layer", of([layer], ["mlp.down_proj.weight"], shuffled))
    for where, layer in (("first", 0), ("middle", shape.count // 2), ("last", last)):
        yield Fault(f"{where} layer dropped", of([layer], into_residual, np.zeros_like))
    yield Fault("biases dropped", of(everywhere, biases, np.zeros_like))
    yield Fault("norm eps 100 times", config={"rms_norm_eps": 1e-4})
    yield Fault("logits x 1.02", _larger)
    yield Fault("KV heads swapped", of(everywhere, kv, reversed_heads))
    ignored = {"sliding_window": None}
    yield Fault("window ignored", config=ignored, shape=dense_like(WINDOWED, layers=shape.count))


def _larger(name: str, values: NDArray[np.float32]) -> NDArray[np.float32] | None:
    return values * np.float32(1.02) if name == "model.norm.weight" else None


class Bench:
    """Checkpoints, what the stacks make of them, and their logits, each made once, in one folder."""

    def __init__(self, folder: Path, shape: Decoder = SHAPE, seed: int = 0) -> None:
        self.folder, self.shape, self.seed = folder, shape, seed
        folder.mkdir(parents=True, exist_ok=True)

    def job(self, stack: str, job: str, path: Path | None, files: dict[str, Path], **more: Any) -> Any:
        options = {o.name: o.default for o in stacks()[stack].options.values()} | {"threads": 1, "n_ctx": 512}
        if job == "quantize":  # takes its own options alone
            options = {}
        model: dict[str, Any] = {"name": "m", "path": str(path) if path else None, "shape": None}
        shape = more.pop("shape", None)
        if stack == "llamacpp" and job in ("synthesize", "convert", "dequantize"):
            file = files.pop("config", files.get("source", self.folder) / "config.json")
            config = layout.dense_config(shape) if shape else json.loads(file.read_text())
            model["layout"] = layout.of(config).plain()
        named = {name: str(file) for name, file in files.items()}
        request = Request(job, stack, "cpu", model, options | more.pop("options", {}), files=named, **more)
        return worker.facts_of(worker.run_job(request, built(stack), self.folder, 1800, 1))

    def sound(self, shape: Decoder) -> Path:
        target = self.folder / f"{shape.arch}-{shape.window}-{shape.count}-{self.seed}"
        if not target.exists():
            options = {"seed": self.seed, "threads": 1}
            self.job("llamacpp", "synthesize", None, {"target": target}, options=options, shape=shape)
        return target

    def faulty(self, sound: Path, fault: Fault) -> Path:
        """A copy of a checkpoint with a fault in it."""
        target = sound.with_name("".join(c if c.isalnum() else "-" for c in f"{sound.name}-{fault.name}"))
        if not target.exists():
            shutil.copytree(sound, target)
            config = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps(config | (fault.config or {})))
            if fault.tensors:
                change(target / "model.safetensors", fault.tensors)
        return target

    def made(self, source: Path, quant: str) -> Path:
        """What the stack of a quantization loads."""
        if quant == "gptq":
            target = source.with_name(f"{source.name}-gptq")
            options = {"format": "gptq", "bits": 4, "group_size": 128, "threads": 1}
            if not target.exists():
                self.job("llamacpp", "pack", source, {"source": source, "target": target}, options=options)
            return target
        if quant in STACK or quant == "fp32":
            return source
        f16, target = (
            source.with_name(f"{source.name}-f16.gguf"),
            source.with_name(f"{source.name}-{quant}.gguf"),
        )
        if not f16.exists():
            self.job(
                "llamacpp", "convert", source, {"source": source, "target": f16}, options={"dtype": "f16"}
            )
        if not target.exists():
            options = {"quant": quant, "as_published": False, "threads": 1}
            files = {"source": f16, "target": target}
            self.job("llamacpp", "quantize", f16, files, options=options)
        return target

    def own(self, source: Path, quant: str) -> Path:
        """The weights that a stack holds, in 16 bits."""
        made, target = self.made(source, quant), source.with_name(f"{source.name}-{quant}-own")
        if quant == "hf-bf16":
            return source
        if target.exists():
            return target
        if quant == "gptq":
            self.job("llamacpp", "unpack", made, {"source": made, "target": target})
        elif quant in STACK:
            self.job("bnb", "dequantize", made, {"target": target}, options={"quant": quant})
        else:
            files = {"source": made, "target": target, "config": source / "config.json"}
            self.job("llamacpp", "dequantize", made, files)
        return target

    def logits(self, path: Path, quant: str) -> tuple[Any, list[int]]:
        file = self.folder / f"{path.name}-{quant}.npy"
        stack = "hf" if quant == "fp32" else STACK.get(quant, "llamacpp")
        positions = [*range(PROMPT), *range(DEPTH - 25, DEPTH)]
        if not file.exists():
            given = {
                "fp32": {"dtype": "fp32", "attn": "eager"},
                "hf-bf16": {"dtype": "bf16"},
                "gptq": {"kernel": "torch"},
            }
            options = given.get(quant, {} if stack == "llamacpp" else {"quant": quant})
            ids = [(1013 + 7919 * i) % self.shape.vocab_size for i in range(DEPTH)]
            workload = {
                "ids": ids,
                "prompt_tokens": PROMPT,
                "windows": [[DEPTH - 25, DEPTH]],
                "seconds": None,
            }
            self.job(stack, "logits", path, {"logits": file}, options=options, workloads=[workload])
        return np.load(file), positions

    def verdicts(self, quant: str, fault: Fault | None = None) -> dict[str, Any]:
        """What the check says of a variant with this fault, and with none. `before`: against the 16-bit
        model; `kernels`: against the sound variant's own weights; `file`: by values and settings. Each true
        where it was found wrong. `error`, `scale`: against its own weights."""
        sound = self.sound(fault.shape if fault and fault.shape else self.shape)
        source = self.faulty(sound, fault) if fault else sound
        ours = self.logits(self.made(source, quant), quant)
        windows = [[0, PROMPT], [DEPTH - 25, DEPTH]]
        own = agreement.compare(*self.logits(self.own(sound, quant), "fp32"), *ours, windows)
        first = agreement.compare(*self.logits(sound, "fp32"), *ours, windows)
        judged = own if quant == "gptq" else first  # a packed checkpoint had its own weights already
        found: dict[str, Any] = {
            "error": max(depth["relative_error"] for depth in own),
            "scale": sum(depth["scale"] for depth in own) / len(own) - 1,
            "error_16_bits": max(depth["relative_error"] for depth in first),
            "before": max(depth["relative_error"] for depth in judged)
            > agreement.allowed(record(quant, judged)),
            "kernels": self._word(quant, first, {"depths": own, "settings": []}),
        }
        if quant != "gptq":  # made with calibration data, its values are not the rounded ones
            settings, values = [], None
            if fault:
                settings = own_weights.other_settings(settings_of(source), settings_of(sound))
            files = {"source": self.own(source, quant), "original": sound}
            values = self.job("llamacpp", "differences", None, files)
            sound_depths = [depth | {"relative_error": 0.0, "scale": 1.0} for depth in own]
            own_says = {"depths": sound_depths, "settings": settings, "values": values}
            found["file"] = self._word(quant, sound_depths, own_says)
            found["values"] = values
        return found

    def _word(self, quant: str, depths: list[Any], own: dict[str, Any]) -> bool:
        return agreement.verdict(record(quant, depths, own))[0] == "wrong"


def record(quant: str, depths: list[Any], own: dict[str, Any] | None = None) -> Any:
    """A checked record, as far as the verdict looks. GPTQ is compared with its own weights alone."""
    check: dict[str, Any] = {"depths": own["depths"] if own and quant == "gptq" else depths}
    check["reference"] = {"unpacked": quant == "gptq"}
    if own and quant != "gptq":
        check["own"] = own
    named = "gptq-int4" if quant == "gptq" else quant
    return {"outcome": "ok", "check": check, "options": {"quant": named}, "model": {"weights": {}}}


def settings_of(source: Path) -> dict[str, Any]:
    fields = dense_fields(locate.read(source).decoder)
    assert fields is not None
    return fields


def change(path: Path, change_of: Change) -> None:
    """Change the values of a bfloat16 safetensors file in place."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, end = (8 + length + at for at in entry["data_offsets"])
        bits = np.frombuffer(bytes(data[first:end]), np.uint16).astype(np.uint32) << 16
        values = change_of(name, bits.view(np.float32).reshape(entry["shape"]))
        if values is not None:
            rounded = np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000
            data[first:end] = (rounded >> 16).astype(np.uint16).tobytes()
    path.write_bytes(data)


def built(stack: str) -> Interpreter:
    found = build.find(stacks()[stack].environments["cpu"])
    if found is None:
        raise SystemExit(f"the environment of {stack} is not built: harness env create {stack}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quants", nargs="+", default=list(QUANTS))
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--sound", action="store_true", help="no faults: how far is a correct run off?")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for what is made, to go on later")
    arguments = parser.parse_args()
    shape = replace(SHAPE, layers=arguments.layers)
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(1, arguments.seeds + 1):
            folder = (arguments.keep or Path(temporary)) / f"{arguments.layers}-{seed}"
            bench = Bench(folder, shape, seed)
            for quant in arguments.quants:
                for fault in [None] if arguments.sound else [None, *faults(shape)]:
                    says = bench.verdicts(quant, fault)
                    found = {way: says[way] for way in ("before", "kernels", "file") if way in says}
                    words = "  ".join(
                        f"{way} {'wrong' if is_wrong else '-':5}" for way, is_wrong in found.items()
                    )
                    name = fault.name if fault else "sound"
                    print(
                        f"{seed} {quant:7} {name:26} {words}  16 bits {says['error_16_bits']:.3f}"
                        f"  own {says['error']:.3f}  scale {says['scale']:+.4f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
