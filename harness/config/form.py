"""The form of a config: the keys of each mapping, and their descriptions for editors."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from harness.config.base import Frozen, Tokens, absolute
from harness.config.experiment import (
    DEVICE,
    REPO,
    Name,
    Protocol,
    Seed,
)
from harness.config.mistakes import shown
from harness.config.workloads import Decode, Workload

Count = Annotated[int, Field(ge=1, le=10_000_000)]


class File(Frozen):
    """The whole file."""

    name: Name | None = None
    """Name of the experiment; by default the file's."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """cpu, cuda, cuda:N, metal, vulkan or hip."""
    gpu: str | None = Field(default=None, min_length=1)
    """Run only where the GPU's name contains this, as in "RTX 4090"."""
    protocol: Protocol = Protocol()
    """How every cell is measured."""
    models: list[Any] = Field(min_length=1)
    """What to measure."""
    variants: list[Any] = Field(min_length=1)
    """How to run it: a stack and its options; a list of values makes a matrix."""
    include: list[Any] = Field(default=[])
    """Variants added after the exclusion."""
    exclude: list[Any] = Field(default=[], max_length=100)
    """Combinations to leave out: globs of model, stack and variant names, and values of options."""
    workloads: list[Annotated[Workload, Field(discriminator="kind")]] = Field(
        default=[Decode()], min_length=1
    )
    """What to run on each model."""


class InlineShape(Frozen):
    """A model's shape, spelled out."""

    arch: Literal["qwen2", "llama"]
    vocab_size: Count
    hidden_size: Count
    layers: Annotated[int, Field(ge=1, le=10_000)]
    intermediate_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Annotated[int, Field(ge=2, le=10_000)] | None = None
    """By default hidden_size / heads."""
    tied: bool = False
    """The output matrix is the embedding."""
    qkv_bias: bool | None = None
    """Biases on q, k and v; by default as the arch has them."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    context: Tokens = 4096

    @model_validator(mode="after")
    def _has_sense(self) -> InlineShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if (self.head_dim or self.hidden_size // self.heads) % 2:
            raise ValueError("head_dim is odd, and rotary embedding needs pairs")
        return self

    def spelled_out(self) -> dict[str, Any]:
        """All keys with their values."""
        return self.model_dump() | {
            "head_dim": self.head_dim or self.hidden_size // self.heads,
            "qkv_bias": self.arch == "qwen2" if self.qkv_bias is None else self.qkv_bias,
        }


QUANT, BITS = "{quant}", "{bits}"


def _known_placeholders(text: str) -> str:
    for placeholder in re.findall(r"\{[^{}]*\}", text):
        if placeholder not in (QUANT, BITS):
            raise ValueError(f"unknown placeholder {shown(placeholder)}; known: {QUANT}, {BITS}")
    return text


Template = Annotated[str, Field(min_length=1), AfterValidator(_known_placeholders)]
"""Text in which `{quant}` and `{bits}` stand for the variant's."""


class PathWeights(Frozen):
    """A GGUF file or a checkpoint's folder here; `{quant}` and `{bits}` stand for the variant's."""

    path: Template
    """Relative to this file's folder, absolute, or from ~."""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str, info: ValidationInfo) -> str:
        return absolute(path, info.context) if info.context else path


class HubWeights(Frozen):
    """A checkpoint of the Hugging Face hub, or one GGUF file of a repository there."""

    repo: Annotated[str, Field(pattern=REPO), AfterValidator(_known_placeholders)]
    """org/name; `{quant}` and `{bits}` stand for the variant's."""
    file: Template | None = None
    """A GGUF in the repository, `{quant}` the variant's quantization; without it, the checkpoint."""
    revision: Annotated[str, Field(min_length=1)] = "main"
    """A branch, a tag or a commit; records have the commit."""

    @model_validator(mode="after")
    def _one_gguf_inside(self) -> HubWeights:
        if self.file is None:
            return self
        if self.file.startswith("/") or ".." in self.file.split("/"):
            raise ValueError("file must be a path inside the repository")
        if not self.file.lower().endswith(".gguf"):
            raise ValueError("file must be a .gguf; omit it to use the checkpoint")
        return self


class SyntheticWeights(Frozen):
    """Random weights of the model's shape, made on this machine."""

    synthetic: Literal[True]
    seed: Seed = 0


class FormatWeights(Frozen):
    """Weights by the format that a stack loads, each as weights for all stacks are given."""

    hf: Any = None
    """A checkpoint of 16 or 32 bits; GGUF stacks convert it unless they have their own file."""
    gguf: Any = None
    """A GGUF, for llama.cpp."""
    gptq: Any = None
    """A GPTQ checkpoint."""
    awq: Any = None
    """An AWQ checkpoint."""


class ModelRow(Frozen):
    """A model: a shape, weights, or both."""

    name: Name | None = None
    """By default the shape's name, else that of the weights' file, folder or repository."""
    shape: Any = None
    """A known model's name (of the hub or of Ollama too), the path of a config.json (it ends in .json), or a
    dense shape spelled out; the weights may bring their own."""
    weights: Any = "synthetic"
    """synthetic, the name of a shipped model, a path, served (a server has them), or a mapping: path; repo,
    file and revision; synthetic and seed; or one of these by format (hf, gguf, gptq, awq), or GGUF files by
    their types (q8_0, q4_k_m)."""
    where: list[str] = Field(default=["*"], min_length=1)
    """Globs: the devices of a fleet that this model is for; read by run --on alone."""


class VariantRow(Frozen):
    """The keys of a variant other than the options of its stack."""

    stack: str
    """The name of a file in runners/."""
    name: Name | None = None
    """By default the quantization and the options that differ from the stack's defaults."""
    models: list[str] = Field(default=["*"], min_length=1)
    """Globs: the models this variant is for."""
    where: list[str] = Field(default=["*"], min_length=1)
    """Globs: the devices of a fleet that this variant is for; read by run --on alone."""
