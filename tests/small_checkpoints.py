"""Small checkpoints: synthesized in this process, and read and written by the format's description alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.models import layout as layouts
from harness.theory.decoder import Decoder, dense
from runners.protocol import Request
from runners.weights.safetensors import SHARD_BYTES
from runners.weights.synthetic import synthesize

TYPES = {"F16": np.float16, "F32": np.float32, "I8": np.int8, "I32": np.int32, "I64": np.int64}


def laid(shape: Decoder, **config: Any) -> dict[str, Any]:
    """The layout of a dense model, as a request has it. `config`: other keys of its config.json."""
    return layouts.of({**layouts.dense_config(shape), **config}).plain()


def with_layout(request: Request) -> Request:
    """The request with the layout of a dense model, if its job makes tensors of one: by the request's shape,
    else by a config.json."""
    model, files = request.model, request.files
    if request.stack not in ("hf", "llamacpp") or "layout" in model:
        return request
    if request.job not in ("synthesize", "convert", "dequantize"):
        return request
    if model.get("shape"):
        laid_out = laid(dense(**model["shape"]))
    else:
        path = Path(files.get("config", f"{files['source']}/config.json"))
        laid_out = layouts.of(json.loads(path.read_text())).plain()
    return replace(request, model={**model, "layout": laid_out})


def synthesized(
    target: Path, shape: Decoder | None, shard_bytes: int = SHARD_BYTES, layout: Any = None, **options: Any
) -> dict[str, Any]:
    """Facts of a checkpoint that is made in the folder, of a dense shape or of a layout."""
    model = {"name": "m", "path": None, "layout": layout or laid(shape)}
    request = Request("synthesize", "any", "cpu", model, options, [], {"target": str(target)})
    return synthesize(request, lambda phase: None, shard_bytes)


def made(target: Path, shape: Decoder, shard_bytes: int = SHARD_BYTES) -> Path:
    synthesized(target, shape, shard_bytes)
    return target


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, those in bfloat16 as float32."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        assert header.pop("__metadata__", {"format": "pt"}) == {"format": "pt"}
        for name, entry in header.items():
            data = content[slice(*(start + offset for offset in entry["data_offsets"]))]
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(data, TYPES[entry["dtype"]])
            found[name] = values.reshape(entry["shape"])
    return found


def store(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Has model.safetensors hold these tensors."""
    names = {np.dtype(kind).name: name for name, kind in TYPES.items()}
    header, data = {}, b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": names[values.dtype.name], "shape": values.shape, "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def configure(folder: Path, **changes: Any) -> Path:
    """Sets keys of config.json, or writes one."""
    known = config_of(folder) if (folder / "config.json").exists() else {}
    (folder / "config.json").write_text(json.dumps(known | changes))
    return folder
