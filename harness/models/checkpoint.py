"""What a decode step streams from a model's files, by their own headers: shape and tensors, no weights.

Takes a GGUF file (or any part of one), a safetensors file, a config.json, or a folder of them, and believes
none: whatever is wrong is one sentence.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.models import config_json, gguf_split, safetensors_header
from harness.models.config_json import ConfigFileError, ConfigJson
from harness.models.gguf_header import GgufError
from harness.models.gguf_shape import shape_of as gguf_shape_of
from harness.models.safetensors_header import SafetensorsError
from harness.theory import shapes
from harness.theory.packed import Packing
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # what transformers loads a model by
_CONFIG = "config.json"
_LONGEST_INDEX = 4 << 20  # 110 bytes a tensor: 38,000 of them
_MOST_SHARDS, _MOST_TENSORS = 1000, 100_000
_LONGEST_HEADERS = 16 << 20  # of all shards together; 405B has 150 kB
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors", re.DOTALL)
_SHARD_NAME = re.compile(r"[^/\\]+\.safetensors")
_NOT_THE_MODEL = ("adapter", "consolidated")  # a LoRA's weights; Mistral's second copy under other names
_UNREADABLE = re.compile(r"pytorch_model.*\.bin|consolidated.*\.pth", re.DOTALL)
# Parts of a model that also sees or hears, beside its decoder for text, by a piece of their names.
_OTHER_SENSES = re.compile(r"(^|\.)(vision|visual|audio|image|multi_modal|mm_)")
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
FLOATS = ("f64", "f32", "f16", "bf16")
# Tables and masks that older checkpoints store and transformers makes anew, by the ends of their names: no
# linear layer is called attn or attention there. runners/llamacpp_convert.py drops those that it may meet.
_BUFFER = re.compile(r"\.(inv_freq|masked_bias|attn\.causal_mask|((self_)?attn|attention)\.bias)$")


class CheckpointError(ValueError):
    """No model can be told from this path; the message is one sentence."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as stored. `format`: gguf, safetensors or config (which has no tensors). `architecture`: what a
    GGUF calls its own, or the model_type of a config.json; null without either.

    `shape`: null where the headers do not tell one of a dense Llama-like model. `tensors`: of the decoder for
    text, without a vision tower. `tied`: the lm_head is the input embedding; a copy stored beside it is not
    streamed. `synthetic`: our own synthesis made it. `quantization`: the name that the file or its
    config.json gives it; null for none. `config`, `files`: a checkpoint's config.json and safetensors files.
    `packing`: how a GPTQ or AWQ checkpoint says that it is packed.
    """

    path: Path
    format: str
    architecture: str | None
    shape: Shape | None
    tensors: tuple[Tensor, ...]
    tied: bool
    synthetic: bool
    quantization: str | None
    config: Path | None = None
    files: tuple[Path, ...] = ()
    packing: Packing | None = None

    @property
    def loaded(self) -> tuple[Tensor, ...]:
        """The tensors that transformers loads: of a tied model one matrix, and no stored buffer."""
        return tuple(
            tensor
            for tensor in self.tensors
            if not (self.tied and tensor.part == "lm_head") and not _BUFFER.search(tensor.name)
        )

    @property
    def parameters(self) -> int | None:
        """Elements of all tensors, buffers included; by the shape where elements are not weights.

        That is: without tensors, and in safetensors that hold other types than floats of 16 bits or more,
        where weights are packed and their scales are tensors too. ggml's types have their scales inside.
        """
        counted = self._elements()
        if counted is None and self.shape is not None:
            return shapes.parameters(self.shape)
        return counted

    @property
    def beyond_shape(self) -> int | None:
        """Elements that the shape does not account for, as rope_freqs of Llama 3; negative: it has more.

        Null when either is unknown.
        """
        counted = self._elements()
        if counted is None or self.shape is None:
            return None
        return counted - shapes.parameters(self.shape)

    def _elements(self) -> int | None:
        if not self.tensors or (
            self.format == "safetensors" and any(t.type not in FLOATS for t in self.tensors)
        ):
            return None
        return sum(t.elements for t in self.tensors if not (self.tied and t.part == "lm_head"))


def read(path: Path, needs_shape: bool = True) -> Checkpoint:
    """What is at a path: a file by its content, a folder by the model that it holds.

    A folder: model.safetensors, else the shards of its index, else (and these no stack loads) the one
    .safetensors file or complete set of numbered ones (adapter* and consolidated* apart), else its one GGUF,
    else its config.json alone. Raises CheckpointError for everything wrong; unless `needs_shape`, a model
    that a Shape cannot say is none of it.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return _folder(path, needs_shape)
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path}: is not a regular file")
        if status.st_size == 0:
            raise CheckpointError(f"{path}: is empty")
        return _file(path, needs_shape)
    except CheckpointError:
        raise
    except (GgufError, SafetensorsError, ConfigFileError) as damage:
        raise CheckpointError(str(damage)) from damage
    except OSError as refusal:
        name = refusal.filename or path
        raise CheckpointError(f"{name}: {(refusal.strerror or str(refusal)).lower()}") from refusal
    except ValueError as odd:  # of the path itself: it holds a null character
        raise CheckpointError(f"{str(path)!r}: {odd}") from odd


def _file(path: Path, needs_shape: bool) -> Checkpoint:
    with path.open("rb") as file:
        start = file.read(9)
    suffix = path.suffix.lower()
    if suffix == ".gguf" or start[:4] == b"GGUF":
        return _gguf(path)
    if suffix == ".json":
        known = config_json.read(path, needs_shape)
        kind, shape, quantization = known.kind, known.shape, known.quantization
        return Checkpoint(path, "config", kind, shape, (), known.tied, known.synthetic, quantization, path)
    header_length = int.from_bytes(start[:8], "little")
    if suffix == ".safetensors" or (start[8:] == b"{" and header_length < 1 << 32):
        if (shard := _SHARD.fullmatch(path.name)) and int(shard[3]) > 1:
            raise CheckpointError(f"{path}: is one of {int(shard[3])} shards; name their folder")
        config = path.parent / _CONFIG
        return _safetensors(path, [path.name], {}, config if config.exists() else None, needs_shape)
    raise CheckpointError(f"{path}: only GGUF and safetensors headers and config.json can be read")


def _folder(folder: Path, needs_shape: bool) -> Checkpoint:
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    config = folder / _CONFIG if _CONFIG in names else None
    if SINGLE in names:
        return _safetensors(folder, [SINGLE], {}, config, needs_shape)
    if INDEX in names:
        index = _weight_map(folder / INDEX)
        return _safetensors(folder, sorted(set(index.values())), index, config, needs_shape)
    if shards := _unindexed(folder, names):
        return _safetensors(folder, shards, {}, config, needs_shape)
    ggufs = [folder / name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    if len(models := gguf_split.whole(ggufs)) == 1:
        return read(models[0])
    if models:
        raise CheckpointError(f"{folder}: has {len(models)} GGUF models; name one of them")
    if any(_UNREADABLE.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{folder}: its weights are pickled; only safetensors and GGUF headers can be read"
        )
    if config is None:
        raise CheckpointError(f"{folder}: holds no model: no .safetensors, no .gguf, no config.json")
    return _file(config, needs_shape)


def _gguf(path: Path) -> Checkpoint:
    header = gguf_split.read_whole(path)
    experts = header.metadata.get(f"{header.architecture}.expert_count")
    if experts or any("_exps." in name for name in header.tensors):
        raise CheckpointError(f"{path}: is a mixture of experts; only dense models are known")
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{path}: has no input embedding, so it is no whole language model")
    tensors = tuple(header.listed())
    tied = "output.weight" not in header.tensors
    shape, architecture = gguf_shape_of(header), header.architecture
    return Checkpoint(path, "gguf", architecture, shape, tensors, tied, header.synthetic, header.quant)


def _safetensors(
    path: Path, shards: list[str], index: Mapping[str, str], config: Path | None, needs_shape: bool
) -> Checkpoint:
    """All tensors of the shards, as transformers loads them: also those that the index does not name.

    One that the index names and no shard has would be made up there; here it is a mistake, unless it is a
    buffer or the lm_head of a tied model.
    """
    known = config_json.read(config, needs_shape) if config else ConfigJson()  # first: it is read at once
    shape = known.shape
    folder = path if path.is_dir() else path.parent
    tensors: dict[str, Tensor] = {}
    left = _LONGEST_HEADERS
    for name in shards:
        try:
            stored = safetensors_header.read(folder / name)
            left -= safetensors_header.claimed_bytes(folder / name)
        except FileNotFoundError as missing:
            which = f", one of {len(shards)} shards" if len(shards) > 1 else ""
            raise CheckpointError(f"{folder / name}: is missing{which}") from missing
        if left < 0:
            raise CheckpointError(f"{path}: its shards' headers are longer than any model's")
        if twice := tensors.keys() & stored:
            raise CheckpointError(f"{folder / name}: has tensor {min(twice)[:60]!r} of another shard")
        tensors |= stored
        if len(tensors) > _MOST_TENSORS:
            raise CheckpointError(f"{path}: has over {_MOST_TENSORS} tensors, more than any dense model")
    if any(".experts." in name for name in tensors):
        raise CheckpointError(f"{path}: is a mixture of experts; only dense models are known")
    ours = tuple(tensor for name, tensor in tensors.items() if not _OTHER_SENSES.search(name))
    parts = {tensor.part for tensor in ours}
    tied = shape.tied if shape else known.tied or "lm_head" not in parts
    expected = {Tensor(name, "", (), 0) for name in index if name not in tensors}
    for tensor in sorted(expected, key=lambda tensor: tensor.name):
        if tensor.part not in ("other", "lm_head" if tied else "other"):
            shard = index[tensor.name]
            raise CheckpointError(f"{folder / shard}: lacks {tensor.name[:60]!r}, which the index has there")
    if shape and "embedding" not in parts:
        raise CheckpointError(f"{path}: has no input embedding, so it is no whole language model")
    if shape and not tied and "lm_head" not in parts:
        raise CheckpointError(f"{path}: has no lm_head, and its config.json does not tie it to the embedding")
    if shape:
        _check_sizes(path, shape, ours)
    packing, quantization = known.packing, known.quantization
    if quantization is None and any(name.endswith(".qweight") for name in tensors):
        separate = config_json.separate_packing(folder)
        packing, quantization = (separate[1], separate[1].words) if separate else (None, None)
    return Checkpoint(
        path=path,
        format="safetensors",
        architecture=known.kind,
        shape=shape,
        tensors=ours,
        tied=tied,
        synthetic=known.synthetic,
        quantization=quantization,
        config=config,
        files=tuple(folder / name for name in shards),
        packing=packing,
    )


def _check_sizes(path: Path, shape: Shape, tensors: Iterable[Tensor]) -> None:
    """Whether a config.json is that of the tensors beside it. Packed matrices do not tell; these do."""
    numbered = [int(found[1]) for tensor in tensors if (found := _LAYER.search(tensor.name))]
    if len(set(numbered)) != shape.layers:
        raise CheckpointError(
            f"{path}: has {len(set(numbered))} layers, and its config.json says {shape.layers}"
        )
    size = (shape.vocab_size, shape.hidden_size)
    for tensor in tensors:
        if tensor.part == "embedding" and tensor.type in FLOATS and tensor.dims != size:
            stored = " x ".join(map(str, tensor.dims))
            raise CheckpointError(
                f"{path}: its embedding is {stored}, and its config.json says {size[0]} x {size[1]}"
            )


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> shard, as an index has it: names of files of the same folder."""
    weight_map = config_json.object_of(path, _LONGEST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard) or not shard.isprintable():
            raise CheckpointError(f"{path}: names shard {str(shard)[:60]!r}, which is no file of its folder")
    if len(set(weight_map.values())) > _MOST_SHARDS:
        raise CheckpointError(f"{path}: names over {_MOST_SHARDS} shards, more than any model has")
    return weight_map


def _unindexed(folder: Path, names: Iterable[str]) -> list[str]:
    """The model's safetensors files in a folder that has neither model.safetensors nor an index."""
    found = [n for n in names if n.endswith(".safetensors") and not n.startswith(_NOT_THE_MODEL)]
    numbered = [match for name in found if (match := _SHARD.fullmatch(name))]
    if not numbered and len(found) <= 1:
        return found
    if len(numbered) < len(found) or len({(match[1], match[3]) for match in numbered}) > 1:
        raise CheckpointError(
            f"{folder}: has {len(found)} .safetensors files, and no index to tell the model's"
        )
    prefix, count = numbered[0][1], int(numbered[0][3])
    if count > _MOST_SHARDS:
        raise CheckpointError(f"{folder}: claims {count} shards, more than any model has")
    return [f"{prefix}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
