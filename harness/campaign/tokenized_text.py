"""A text, by a checkpoint's own tokenizer.json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.base import bounds
from harness.base.variables import for_workers
from harness.models import limited_tokenizer
from harness.models.locate import WeightsError


@dataclass(frozen=True)
class Tokenized:
    """Ids of a text, without special tokens. `bos`: the id that the tokenizer puts in front of a text (the
    beginning of a sequence); None: none."""

    ids: list[int]
    bos: int | None


def tokenized(path: Path, text: str, count: int) -> Tokenized:
    """The first `count` ids, or all if they are fewer; without padding and truncation.

    In a process with limits: a small file can demand any memory and time. Raises WeightsError.
    """
    if not path.is_file():  # a pipe would be waited for
        raise WeightsError(f"{path}: is not a regular file")
    limits = [str(bounds.TOKENIZER_BYTES), str(bounds.TOKENIZER_S)]
    command = [sys.executable, "-I", limited_tokenizer.__file__, str(path), str(count), *limits]
    variables = for_workers(os.environ) | {"TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run(command, input=text.encode(), capture_output=True, env=variables)
    if ran.returncode:
        by = signal.Signals(-ran.returncode).name if ran.returncode < 0 else f"exit code {ran.returncode}"
        most = f"{bounds.TOKENIZER_BYTES / 1e9:.1f} GB of memory and {bounds.TOKENIZER_S} s of CPU time"
        raise WeightsError(f"{path}: its tokenizer ended with {by}; it may take {most}")
    answer = json.loads(ran.stdout)
    if "error" in answer:
        raise WeightsError(f"{path}: {answer['error']}")
    return Tokenized(answer["ids"], answer["bos"])
