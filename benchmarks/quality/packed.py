"""A checkpoint in 4 bits by gptqmodel's own quantizers, calibrated. Runs under gptqm's interpreter.

INTERPRETER packed.py SOURCE TARGET METHOD TEXT WINDOW     METHOD: gptq or awq
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("GPTQMODEL_OFFLINE", "1")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default is 1 on two cores, and its loader wants 2

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tokenizers import Tokenizer

# AWQ's own choice packs on a GPU alone ("CUDA is not available."); GPTQ's does not.
PACKED_BY = {"gptq": BACKEND.AUTO, "awq": BACKEND.AWQ_TORCH}
STORED_AS = {"gptq": "gptq", "awq": "gemm"}


def main(source: str, target: str, method: str, text: str, window: int) -> None:
    torch.manual_seed(0)
    ids = Tokenizer.from_file(f"{source}/tokenizer.json").encode(Path(text).read_text(encoding="utf-8")).ids
    samples = [ids[first : first + window] for first in range(0, len(ids) - window + 1, window)]
    calibration = [{"input_ids": each, "attention_mask": [1] * len(each)} for each in samples]
    config = QuantizeConfig(
        bits=4, group_size=128, quant_method=method, format=STORED_AS[method], device="cpu"
    )
    model = GPTQModel.load(source, config)
    model.quantize(calibration, batch_size=1, backend=PACKED_BY[method])
    model.save(target)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
