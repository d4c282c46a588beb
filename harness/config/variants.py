"""One variant: its stack, its weights format, its options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from harness.base import bounds, data
from harness.base.files import is_local
from harness.base.text import server_address, shortened
from harness.config import yaml_text
from harness.config.experiment import (
    DEVICE,
    REPO,
    Decode,
    Exclude,
    Frozen,
    Model,
    Name,
    Plain,
    Protocol,
    Scalar,
    Seed,
    Tokens,
    Variant,
    Weights,
    Workload,
    absolute,
    tokens_of,
)
from harness.config.yaml_text import Loc, Mistakes, expected, shown, suggestion
from harness.stacks.header import Option, Options, Value, runners_folder, stacks
from harness.theory import base_shapes, names
from harness.theory.decoder import dense
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.known_models import Described, NoModel, described
from harness.theory.names import NotUnderstood
from harness.theory.packed_sizes import FORMATS
from harness.theory.quantities import TOKENS

# The form of the file: the keys of each mapping, and their descriptions for editors.


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


# Parse the rows of models and of workloads.


_FORMATS = tuple(FormatWeights.model_fields)
_BY_FORMAT = (*_FORMATS, *ALL_QUANTS)


def repository(given: str) -> tuple[str, str]:
    """The repository of `org/name:Q4_K_M`, and the type of its GGUF: of one that is named as a repository of
    GGUFs alone Q4_K_M, as in `llama-server -hf`; else empty."""
    name = base_shapes.without_site(given)
    repo, _, quant = name.partition(":")
    if quant and not re.fullmatch(base_shapes.GGUF_TYPE, quant, re.IGNORECASE):
        return name, ""  # a tag of Ollama's, such as a size
    return repo, quant or ("Q4_K_M" if repo.lower().endswith("-gguf") else "")


def model_row(given: Any, folder: Path) -> Any:
    """The row of a model that is given as a word: a path, a repository of the hub (org/name, or
    org/name:Q4_K_M for its GGUF of that type), else a shape."""
    if not isinstance(given, str):
        return given
    if is_local(given, folder) or given in data.weights_names():
        return {"weights": given}
    repo, quant = repository(given)
    if not re.match(REPO, repo):
        return {"shape": given}
    if not quant:
        return {"weights": {"repo": repo}}
    return {"name": safe_name(repo.partition("/")[2]), "weights": {"repo": repo, "file": f"*{quant}.gguf"}}


def model_of(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Model | None:
    """The model of a row; null after adding its mistakes. Relative paths start at `folder`."""
    row = mistakes.checked(ModelRow, given, loc)
    if row is None:
        return None
    before = len(mistakes.found)
    known, made = _shape(row.shape, (*loc, "shape"), folder, mistakes)
    by_format = isinstance(row.weights, dict) and any(form in row.weights for form in _BY_FORMAT)
    of_format: dict[str, Weights] = {}
    if by_format:
        of_format = _of_format(row.weights, (*loc, "weights"), folder, mistakes)
        weights = next(iter(of_format.values()), None)
    else:
        weights = _weights(row.weights, (*loc, "weights"), folder, mistakes)
    if weights is None or len(mistakes.found) > before:
        return None
    if made is None and any(given.kind == "synthetic" for given in (weights, *of_format.values())):
        mistakes.add(loc, "synthetic weights need a shape; harness theory --list-models has them")
        return None
    # A file of the user's goes by its own name: the shape alone does not make it the model of that name.
    name = row.name or (_name_of(weights) if weights.kind == "path" else known or _name_of(weights))
    if name is None:
        mistakes.add(loc, "an inline shape needs a name; add the key name")
        return None
    return Model(
        name=name,
        described=made,
        weights=weights,
        of_format=of_format,
        where=tuple(row.where),
    )


def _shape(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> tuple[str | None, Described | None]:
    """The name of a known model, and its layers."""
    if isinstance(given, dict):
        row = mistakes.checked(InlineShape, given, loc)
        return None, Described(dense(**row.spelled_out())) if row else None
    if isinstance(given, str):
        try:
            name, made = described(given, folder, otherwise="spell the shape out")
            return safe_name(name) or None, made
        except NoModel as why:
            mistakes.add(loc, str(why))
            return None, None
    if given is not None:
        mistakes.add(loc, expected("a shape's name", given))
    return None, None


def named_shape(given: str, loc: Loc, mistakes: Mistakes) -> names.Named | None:
    """The known shape with this name; null after adding the mistake."""
    try:
        return names.named(given, otherwise="spell the shape out")
    except NotUnderstood as why:
        mistakes.add(loc, why.sentence("shape", shown(given)))
        return None


def _of_format(given: Plain, loc: Loc, folder: Path, mistakes: Mistakes) -> dict[str, Weights]:
    """Weights by format or type, in the order of the forms, without invalid ones."""
    formats = {form: weights for form, weights in given.items() if form not in ALL_QUANTS}
    if mistakes.checked(FormatWeights, formats, loc) is None:
        return {}
    found: dict[str, Weights] = {}
    for form in _BY_FORMAT:
        weights = _weights(given[form], (*loc, form), folder, mistakes) if form in given else None
        if weights and weights.file is not None and form in _FORMATS and form != "gguf":
            mistakes.add((*loc, form, "file"), f"{form} weights are a checkpoint: a repo without file")
        elif weights:
            found[form] = weights
    return found


def _weights(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Weights | None:
    if isinstance(given, str):
        if given == "synthetic":
            return Weights()
        if given == "served":
            return Weights(kind="served")
        if given in data.weights_names() and not (folder / given).exists():  # the user's own goes first
            return Weights(kind="path", path=str(data.weights(given)))
        named = ["synthetic", *data.weights_names()]
        is_misspelt = not re.search(r"[./~{]", given) and "did you mean" in (hint := suggestion(given, named))
        if is_misspelt and not (folder / given).exists():
            mistakes.add(loc, f"unknown weights {shown(given)}{hint}")
            return None
    elif not isinstance(given, dict):
        mistakes.add(loc, expected("synthetic, a path or a mapping", given))
        return None
    if isinstance(given, dict) and ("repo" in given or "file" in given):
        hub = mistakes.checked(HubWeights, given, loc)
        return Weights(kind="hub", **hub.model_dump()) if hub else None
    if isinstance(given, str) or "path" in given:
        local = mistakes.checked(PathWeights, given, loc, folder)
        return Weights(kind="path", path=local.path) if local else None
    if "synthetic" in given:
        random = mistakes.checked(SyntheticWeights, given, loc)
        return Weights(seed=random.seed) if random else None
    formats = () if loc[-1] in _BY_FORMAT else _FORMATS
    for key in given:
        hint = suggestion(key, ("path", "repo", "file", "synthetic", *formats))
        mistakes.add((*loc, key), "unknown key" + hint)
    if not given:
        mistakes.add(loc, "expected path, repo, or synthetic: true")
    return None


def _name_of(weights: Weights) -> str | None:
    source = weights.path or weights.file or weights.repo
    if source is None:
        return None
    name = Path(source).name
    is_file = source != weights.repo and name.lower().endswith(".gguf")
    stem = name[:-5] if is_file else name  # a folder's name may contain dots
    return safe_name(stem.replace(QUANT, "").replace(BITS, "")) or "model"


def safe_name(text: str) -> str:
    """The text as a folder's name; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]


# Parse the rows of variants and exclusions: check options by the stack's header, expand matrices.


EXCLUDED_BY = ("model", "stack", "variant", "workload")  # globs; other keys are values of options

_TYPES = {"int": int, "float": float, "bool": bool}  # all others are text
_INT32 = 2**31 - 1  # stacks pass whole numbers to C, which silently truncates larger ones
_MAX_NAME = 100
SECRET = r"HARNESS_[A-Z0-9_]{1,60}"  # a config of somebody else's must not send another key to its server


def variant_row(stack: str) -> type[VariantRow]:
    """The form of a variant's row: its keys, and each option of the stack with a value or a list of them."""
    return _variant_row(stack, runners_folder())


@cache
def _variant_row(stack: str, runners: Path) -> type[VariantRow]:
    header = stacks()[stack]
    fields: dict[str, Any] = {"stack": (Literal[stack], ...)}
    for name, option in header.options.items():
        one = _value_type(option, is_secret=name == header.secret)
        many: Any = Annotated[list[one], Field(min_length=1)]  # type: ignore[valid-type]
        field = Field(default=option.default, description=option.help)
        fields[name] = (Annotated[many, BeforeValidator(_one_or_several)], field)
    return create_model(f"{stack}-variant", __base__=VariantRow, __doc__=header.summary, **fields)


def _one_or_several(value: Any) -> Any:
    if value == []:
        raise ValueError("an empty list gives no variants")
    return value if isinstance(value, list) else [value]


def _value_type(option: Option, is_secret: bool) -> Any:
    """The type of one value of an option, its bounds and its choices."""

    def typed(value: Any) -> Any:
        if option.type in ("path", "url") and not isinstance(value, str):
            raise ValueError(expected("a path" if option.type == "path" else "an address", value))
        return tokens_of(value) if option.type == "int" else value

    def allowed(value: Any) -> Any:
        if option.choices and value not in option.choices:
            raise ValueError(f"unknown {option.name} {shown(value)}" + suggestion(value, option.choices))
        if is_secret and not re.fullmatch(SECRET, value):
            raise ValueError("must be the name of a variable, HARNESS_..., never the key itself")
        if option.type == "path":
            absolute(value, Path())  # a variant's name has the path as it was written
        return server_address(value) if option.type == "url" else value

    low, high = option.minimum, option.maximum
    extra: Any = {"enum": [*option.choices]} if option.choices else None
    if option.type == "int":
        low, high = -_INT32 if low is None else low, _INT32 if high is None else high
        extra = extra or {"type": ["integer", "string"], "pattern": TOKENS}
    rules: list[Any] = [Field(ge=low, le=high, json_schema_extra=extra)]
    if option.type in ("int", "path", "url"):
        rules.append(BeforeValidator(typed))
    if option.choices or is_secret or option.type in ("path", "url"):
        rules.append(AfterValidator(allowed))
    return Annotated[(_TYPES.get(option.type, str), *rules)]


def expanded(given: Any, loc: Loc, names: list[str], folder: Path, mistakes: Mistakes) -> list[Variant]:
    """All variants of a row, first list outermost; empty after adding its mistakes. `names`: the models'.
    Relative paths start at `folder`."""
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping such as {stack: llamacpp, quant: q4_0}", given))
        return []
    before = len(mistakes.found)
    stack = given.get("stack")
    header = stacks().get(stack) if isinstance(stack, str) else None
    if header is None:
        known = {key: given[key] for key in VariantRow.model_fields if key in given}
        if mistakes.checked(VariantRow, known, loc):
            mistakes.add((*loc, "stack"), f"unknown stack {shown(stack)}" + suggestion(stack, stacks()))
        return []
    row = mistakes.checked(variant_row(header.stack), given, loc)
    if row is None:
        return []
    for index, glob in enumerate(row.models):
        if names and not any(fnmatchcase(name, glob) for name in names):
            mistakes.add((*loc, "models", index), f"{shown(glob)} matches no model" + suggestion(glob, names))
    if len(mistakes.found) > before:
        return []
    values: dict[str, list[Scalar]] = {key: getattr(row, key) for key in given if key in header.options}
    for key in [key for key in values if header.options[key].type == "url"]:
        values[key] = [*dict.fromkeys(values[key])]  # two spellings of one address
    if (count := math.prod(len(v) for v in values.values())) > bounds.CONFIG_CELLS:
        mistakes.add(loc, f"a matrix of {count} variants; at most {bounds.CONFIG_CELLS}")
        return []
    defaults = {key: option.default for key, option in header.options.items()}
    varying = [key for key in values if len(values[key]) > 1]
    found = []
    for chosen in product(*values.values()):
        options = dict(zip(values, chosen, strict=True))
        name = _variant_name(row.name, options, varying, defaults, header.named)
        if len(name) > _MAX_NAME:
            mistakes.add(loc, f"the variant name {shown(name)} is too long; give it a shorter name")
            return []
        for key in [key for key, path in options.items() if path and header.options[key].type == "path"]:
            options[key] = absolute(str(options[key]), folder)
        of = {"models": tuple(row.models), "where": tuple(row.where)}
        found.append(Variant(stack=row.stack, name=name, options=options, **of))
    return found


def given_values(stack: str, name: str, text: str) -> list[Scalar]:
    """The values of an option of `--option NAME=VALUE,...`. Raises ConfigError."""
    place = f"--option {shortened(f'{name}={text}')}"
    mistakes = Mistakes(lambda loc: place)
    values = [yaml_text.parse(word, lambda line: place)[0] for word in text.split(",")]
    if name not in (options := stacks()[stack].options):
        mistakes.add((), f"unknown option of {stack}" + suggestion(name, options))
    row = not mistakes.found and mistakes.checked(variant_row(stack), {"stack": stack, name: values}, ())
    mistakes.found = [((), sentence) for _, sentence in mistakes.found]
    mistakes.stop_if_any()
    return list(getattr(row, name))


def varied(variant: Variant, changes: Mapping[str, Scalar]) -> Variant:
    """The variant with other values of some options, which its name ends with."""
    name = "-".join([variant.name, *(f"{key}={_word(value)}" for key, value in changes.items())])
    options = {**variant.options, **changes}
    return variant.model_copy(update={"name": name[:_MAX_NAME], "options": options})


def weights_format(variant: Variant) -> str:
    """The format that the variant's stack loads: gguf, hf, gptq, awq or none. A header with an option in
    braces takes that option's value."""
    header = stacks()[variant.stack]
    if not header.weights.startswith("{"):
        return header.weights
    option = header.options[header.weights[1:-1]]
    return str(variant.options.get(option.name, option.default))


def quant_of(variant: Variant) -> str | None:
    """The requested quantization or the stack's default; null: as stored."""
    quant = _option_of(variant, "quant")
    return None if quant is None else str(quant)


def weights_of(model: Model, variant: Variant) -> Weights | None:
    """The weights that a variant loads, placeholders in place; null: its stack could load none."""
    return model.weights_for(weights_format(variant), quant_of(variant))


def bits_of(variant: Variant) -> int | None:
    """The requested bits of GPTQ or AWQ weights, 4 by default; null for other stacks."""
    if weights_format(variant) not in FORMATS:
        return None
    bits = _option_of(variant, "bits")
    return 4 if bits is None else int(bits)


def _option_of(variant: Variant, name: str) -> Value:
    option = stacks()[variant.stack].options.get(name)
    return variant.options.get(name, option.default if option else None)


def _variant_name(
    given: str | None,
    options: dict[str, Scalar],
    varying: list[str],
    defaults: Options,
    named: tuple[str, ...],
) -> str:
    """The given name and the options that vary; else the named options and those that are not the default."""
    keys = sorted(varying if given else [key for key in options if options[key] != defaults[key]])
    parts: list[Value] = [given] if given else []
    parts += [options.get(key, defaults[key]) for key in named if not given or key in varying]
    parts += [f"{key}={_word(options[key])}" for key in keys if key not in named]
    return "-".join(str(part) for part in parts if part) or ("as-stored" if "quant" in named else "default")


def _word(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))


def exclusion(given: Any, loc: Loc, used: set[str], mistakes: Mistakes) -> Exclude | None:
    """The rule of a row; null after adding its mistakes. `used`: the stacks of the variants."""
    if not isinstance(given, dict) or not given:
        what = expected("a mapping such as {model: qwen*, quant: q4_0}", given)
        mistakes.add(loc, "is empty, which would exclude everything" if given == {} else what)
        return None
    before = len(mistakes.found)
    names = {key: given[key] for key in EXCLUDED_BY if key in given}
    options = {key: value for key, value in given.items() if key not in names}
    known = {key: option.type for stack in used for key, option in stacks()[stack].options.items()}
    for key, glob in names.items():
        if not isinstance(glob, str):
            mistakes.add((*loc, key), expected("text", glob))
    wanted = {key: tuple(value) if isinstance(value, list) else (value,) for key, value in options.items()}
    wanted |= {key: tuple(map(tokens_of, wanted[key])) for key in wanted if known.get(key) == "int"}
    for key, values in wanted.items():
        if key not in known:
            hint = suggestion(key, [*sorted(known), *EXCLUDED_BY])
            mistakes.add((*loc, key), "unknown key" + hint)
        elif not all(isinstance(value, (str, int, float)) for value in values):
            mistakes.add((*loc, key), expected("a value, or a list of values", options[key]))
    return Exclude(**names, options=wanted) if len(mistakes.found) == before else None
