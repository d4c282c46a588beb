"""A checkpoint of one file stored again, with other tensors and another config.json."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int], bytes]]
"""By name: type, dimensions, and values as stored."""


def stored_again(
    source: Path, target: Path, change: Callable[[Tensors], object] = lambda tensors: None, **config: Any
) -> Path:
    """`change`: gets all tensors, to change them. `config`: keys of config.json that are set."""
    shutil.copytree(source, target)
    tensors = read(target)
    change(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers 4 asks for
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    known = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(known | config))
    return target


def read(folder: Path) -> Tensors:
    """The tensors of a checkpoint."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = {n: e for n, e in json.loads(data[8:start]).items() if n != "__metadata__"}
    return {
        name: (each["dtype"], each["shape"], data[slice(*(start + at for at in each["data_offsets"]))])
        for name, each in header.items()
    }
