"""Where weights of known models are published: tags of Ollama's library, repositories of the hub. Pure.

The tags are those in tests/tables/hub_names.csv; the repositories and their types those of the files in
tests/models/gguf_files.json, and Qwen/Qwen3-8B-GGUF as public READMEs serve it (`llama-server -hf`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from harness.base import data
from harness.theory.known_models import known_name

USUAL_TYPE = "q4_k_m"


@dataclass(frozen=True)
class Download:
    """`ollama`: a tag. `repository`: of the hub, with GGUF files of these types. Either may be empty."""

    ollama: str
    repository: str
    types: tuple[str, ...]

    def on_hub(self, quant: str | None) -> str:
        """The repository with a type, as `llama-server -hf` and `harness run` take it; empty: not there.
        `quant`: None for the usual type."""
        quant = quant or (USUAL_TYPE if USUAL_TYPE in self.types else next(iter(self.types), ""))
        return f"{self.repository}:{quant.upper()}" if quant in self.types else ""


def download_of(name: str) -> Download | None:
    """The download of a model, by any name of it; None: unknown, or for tuned weights alone."""
    is_base = "base" in re.split(r"\W+", name.lower())
    return None if is_base else _downloads().get(known_name(name) or "")


def fetches(name: str, quant: str | None = None) -> list[str]:
    """The commands that fetch a model's GGUF. `quant`: the type that was requested; None: the usual."""
    download = download_of(name)
    if download is None:
        return []
    pulls = [f"ollama pull {download.ollama}"] if download.ollama and not quant else []
    repository, _, kind = download.on_hub(quant).partition(":")
    return pulls + ([f"hf download {repository} --include '*{kind}.gguf'"] if repository else [])


@cache
def _downloads() -> dict[str, Download]:
    return {
        row["model"]: Download(row["ollama"], row["repository"], tuple(row["types"].split()))
        for row in data.rows("downloads.csv")
    }
