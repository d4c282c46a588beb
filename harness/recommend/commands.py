"""What to type to run a chosen variant: commands and files of common programs, and a config of ours. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.base.text import yaml_word
from harness.config.plan import Cell
from harness.recommend.candidates import Candidate
from harness.stacks.header import references
from harness.theory import downloads

_ALL_LAYERS = 999


@dataclass(frozen=True)
class Source:
    """A model's source of weights. `checkpoint`: a hub repository or folder for transformers; None: unknown.
    `gguf`: the given file, and `gguf_type` its type. `row`: the model's row in a config; None where
    no row can name the model."""

    name: str
    checkpoint: str | None = None
    gguf: str | None = None
    gguf_type: str | None = None
    row: Mapping[str, object] | None = None


def commands_of_candidate(
    candidate: Candidate, source: Source, context: int, family: str, threads: int | None
) -> dict[str, str]:
    """The commands by program that run the variant on a device of this family. `threads`: None for another
    machine."""
    cell, on_gpu = candidate.cell, family != "cpu"
    pairs = {"stack": cell.variant.stack, **cell.variant.options}.items()
    variant = f"variants: [{{{', '.join(f'{key}: {yaml_word(value)}' for key, value in pairs)}}}]"
    whole = [f"device: {family}", f"models: [{json.dumps(source.row)}]"] if source.row else []
    ours = {"harness run": "\n".join([*whole, variant])}
    if cell.weights_format == "gguf":
        return _llama_cpp(candidate, source, context, on_gpu, threads) | ours
    return _of_torch(candidate, source, context, on_gpu) | ours


def _of_torch(candidate: Candidate, source: Source, context: int, on_gpu: bool) -> dict[str, str]:
    cell, checkpoint = candidate.cell, source.checkpoint
    kind = {"awq": "an AWQ checkpoint", "gptq": "a GPTQ checkpoint"}.get(cell.weights_format)
    if kind or checkpoint is None:
        then = f"; vLLM serves it, with --max-model-len {context}" if kind and on_gpu else ""
        return {"fetch": f"{kind or 'a checkpoint'} of {source.name}{then}"}
    if (stack := cell.variant.stack) == "mlx":
        bits = {"int4": " -q --q-bits 4", "int8": " -q --q-bits 8"}.get(str(cell.quant), "")
        convert = f'mlx_lm.convert --hf-path "{checkpoint}"{bits} --mlx-path {source.name}-mlx'
        return {"mlx-lm": f"{convert}\nmlx_lm.server --model {source.name}-mlx"}
    where = ', device_map="cuda"' if on_gpu else ""
    load = f'AutoModelForCausalLM.from_pretrained("{checkpoint}", '
    dtype = "float16" if cell.variant.options.get("dtype") == "fp16" else "bfloat16"
    if words := cell.header.loads.get(cell.quant or ""):
        return {"transformers": f"{load}{words.replace('bfloat16', dtype)}{where})"}
    longer = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 " if context > candidate.trained else ""
    served = f'{longer}vllm serve "{checkpoint}" --dtype {dtype} --max-model-len {context}'
    of_transformers = {} if stack == "vllm" else {"transformers": f'{load}dtype="{dtype}"{where})'}
    return of_transformers | ({"vLLM": served} if on_gpu else {})


def config_text(cells: Sequence[Cell], model: Mapping[str, object], device: str, context: int) -> str:
    """YAML for `harness run` that measures the variants: a short decode, and windows up to the context.
    `model`: its row."""
    depths = sorted({0, context // 4, context - 1})
    rows = [
        {
            "stack": cell.variant.stack,
            **({"name": measured_name(cell)} if _takes_file_as_it_is(cell) else {}),
            **cell.variant.options,
        }
        for cell in cells
    ]
    return (
        f"device: {device}\n"
        "protocol: {new_tokens: 128, repeats: 2, retry_disturbed: 1}\n"
        f"models: [{json.dumps(model)}]\n"
        "variants:\n" + "".join(f"  - {json.dumps(row)}\n" for row in rows) + "workloads:\n"
        "  - {kind: decode}\n"
        f"  - {{kind: depth, depths: {depths}, window: 16, most_windows: 6, stop_at: 1%}}\n"
    )


def measured_name(cell: Cell) -> str:
    """The variant's name in that config, where given names have no `=`."""
    name = cell.variant.name
    return name.replace("=", "-") if _takes_file_as_it_is(cell) else name


def _takes_file_as_it_is(cell: Cell) -> bool:
    """Whether the stack takes the file's type, which no option gives, so that the row needs a name."""
    return cell.weights_format == "gguf" and cell.quant is None


def _llama_cpp(
    candidate: Candidate, source: Source, context: int, on_gpu: bool, threads: int | None
) -> dict[str, str]:
    options, quant = candidate.cell.options(threads or 1), candidate.type
    split = candidate.split
    layers = split.gpu_layers if split and split.gpu_layers else _ALL_LAYERS if on_gpu else 0
    is_given = source.gguf is not None and source.gguf_type == quant
    is_here = source.gguf or source.checkpoint
    published = None if is_here else downloads.download_of(source.name)
    on_hub = published.on_hub(quant) if published else ""
    file = str(source.gguf) if is_given else f"{source.name}-{quant.upper()}.gguf"
    whole = source.gguf or f"{source.name}-F16.gguf"
    flash, cache = bool(options.get("flash_attn")), [str(options.get(k)) for k in ("type_k", "type_v")]
    model = f"-hf {on_hub}" if on_hub else f"-m {file}"
    given = f"{model} -c {context} {f'-ngl {layers} ' if on_gpu else ''}-fa {'on' if flash else 'off'}"
    given += f" --n-cpu-moe {split.n_cpu_moe}" if split and split.n_cpu_moe else ""
    given += f" -t {threads}" if threads and (not on_gpu or split) else ""
    given += f" -ctk {cache[0]} -ctv {cache[1]}" if cache != ["f16", "f16"] else ""
    origin = f"hf.co/{on_hub}" if on_hub else file if file.startswith("/") else f"./{file}"
    lines = [f"FROM {origin}", f"PARAMETER num_ctx {context}"]
    lines += [f"PARAMETER num_gpu {layers}"]
    lines += [f"PARAMETER num_thread {threads}"] if threads and not on_gpu else []
    variables = ["OLLAMA_FLASH_ATTENTION=1"] if flash else []
    variables += [f"OLLAMA_KV_CACHE_TYPE={cache[0]}"] if cache[0] != "f16" else []
    lines += [f"# start the server with {' '.join(variables)}"] if variables else []
    stack = candidate.cell.variant.stack
    is_fork = candidate.cell.header != references()["gguf"]
    measured = source.checkpoint or on_hub or file
    measure = {"measure": f"harness run {shlex.quote(measured)}"}
    measure["measure"] += f" --quant {quant}" if source.checkpoint else ""
    measure["measure"] += f" --stacks {stack}" if is_fork else ""
    if is_here:
        steps = [] if source.gguf else _converted(source, whole)
        steps += [] if is_given or file == whole else [f"llama-quantize {whole} {file} {quant.upper()}"]
        makes = {"first": "\n".join(steps)} if steps else {}
    elif on_hub:
        makes = {"fetch": downloads.fetches(source.name, quant)[0]}
    else:
        tag = f"; or in the type that Ollama has: ollama pull {published.ollama}" if published else ""
        makes = {"fetch": f"a GGUF of {source.name} in {quant.upper()}, as {file}{tag}"}
    servers = {"llama-server": f"llama-server {given}", "llama-cli": f"llama-cli {given}"}
    if is_fork:  # whose programs have the same names
        servers = {f"{stack} {name.removeprefix('llama-')}": line for name, line in servers.items()}
        return makes | measure | servers
    if split and split.n_cpu_moe:  # which Ollama cannot be told
        return makes | measure | servers
    return makes | measure | servers | {"Modelfile": "\n".join(lines)}


def _converted(source: Source, file: str) -> list[str]:
    """How a checkpoint becomes a GGUF of 16 bits, with the script in llama.cpp's repository."""
    folder, steps = source.checkpoint, []
    if source.checkpoint and not source.checkpoint.startswith("/"):
        folder = source.name
        steps = [f"hf download {source.checkpoint} --local-dir {folder}"]
    return [*steps, f'python convert_hf_to_gguf.py "{folder}" --outtype f16 --outfile {file}']
