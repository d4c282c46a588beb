"""A GGUF in another type, quantized by llama.cpp itself."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from runners.llamacpp_lib import FTYPES, LOG, lib, metadata, opened
from runners.protocol import Request, Say

SAY_EVERY_S = 0.3
QUANTIZE_BUFFER_BYTES = 256 << 20  # of rows at once; llama.cpp's own default is 8 GiB


def quantize(request: Request, say: Say) -> dict[str, Any]:
    """files["source"] -> files["target"] by llama.cpp's llama_model_quantize.

    Options: `quant`, `threads`, and `as_published`: by the rules of the published files, not today's.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    if not source.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{source} would be overwritten while it is read")
    params = quantize_params(source, **request.options)
    last_report = began

    def progress(line: str) -> None:
        nonlocal last_report
        if line.startswith("[") and (now := time.monotonic()) > last_report + SAY_EVERY_S:
            last_report = now
            say("tensor " + line[1:].split("]")[0].replace(" ", ""))

    LOG.forget()
    with LOG.listening(progress):
        failed = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if failed:
        free_mb = shutil.disk_usage(target.parent).free // 10**6
        raise LOG.failure(f"{source.name} to {request.options['quant']}, {free_mb} MB free")
    say("flushing to disk")
    file = os.open(target, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": target.stat().st_size,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def quantize_params(source: Path, quant: str, threads: int, as_published: bool = False) -> Any:
    """llama.cpp's defaults, except for memory and, with `as_published`, for a type that changed since."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = FTYPES[quant]
    params.nthread = threads
    params.max_buf_size = QUANTIZE_BUFFER_BYTES
    if as_published and quant in ("q2_k", "q3_k_s"):
        with opened(source, vocab_only=True) as model:
            width = metadata(model, f"{metadata(model, 'general.architecture')}.feed_forward_length")
        # Rows that 256 does not divide cannot be Q3_K. llama.cpp made them Q4_1 when the published q2_k files
        # of 1.8B and 14B were made. Now it makes them Q4_0, which gives other sizes.
        if width.isdigit() and int(width) % 256:
            override = lib.llama_model_tensor_override
            params.tt_overrides = (override * 2)(override(b"ffn_down", lib.GGML_TYPE_Q4_1), override())
    return params
