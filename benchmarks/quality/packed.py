"""The shipped model in 4 bits by gptqmodel's own quantizers, calibrated. Runs under gptqm's interpreter.

INTERPRETER packed.py SOURCE TARGET METHOD TEXT WINDOW     METHOD: gptq or awq
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from tokenizers import Tokenizer


def main(source: str, target: str, method: str, text: str, window: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    ids = Tokenizer.from_file(f"{source}/tokenizer.json").encode(Path(text).read_text(encoding="utf-8")).ids
    samples = [ids[first : first + window] for first in range(0, len(ids) - window, window)]
    calibration = [{"input_ids": each, "attention_mask": [1] * len(each)} for each in samples]
    form = {"gptq": "gptq", "awq": "gemm"}[method]
    config = QuantizeConfig(bits=4, group_size=128, quant_method=method, format=form, device="cpu")
    model = GPTQModel.load(source, config, device="cpu")
    model.quantize(calibration, batch_size=1)
    model.save(target)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
