"""A GGUF file written again: with other keys and tensors, or in parts as llama-gguf-split writes them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import gguf
from gguf import GGUFValueType, ReaderField, ReaderTensor

_OF_A_SPLIT = {
    "split.no": GGUFValueType.UINT16,
    "split.count": GGUFValueType.UINT16,
    "split.tensors.count": GGUFValueType.INT32,
}
Change = Callable[[list[ReaderTensor]], Mapping[str, ReaderTensor]]


def written_again(source: Path, target: Path, more: Change = lambda tensors: {}, **keys: str | int) -> Path:
    """`more`: further tensors, by name. `keys`: to set, with `_` for a dot where the file has them."""
    reader = gguf.GGUFReader(source)
    named = {name.replace(".", "_"): name for name in reader.fields}
    given = {named.get(key, key): value for key, value in keys.items()}
    tensors = [(tensor.name, tensor) for tensor in reader.tensors]
    _write(target, reader.fields.values(), given, [*tensors, *more(reader.tensors).items()])
    return target


def in_parts(source: Path, prefix: Path, count: int) -> list[Path]:
    """The keys are in the first part, a share of the tensors in each."""
    reader = gguf.GGUFReader(source)
    tensors = [(tensor.name, tensor) for tensor in reader.tensors]
    share, paths = -(-len(tensors) // count), []
    for number in range(count):
        given = dict(zip(_OF_A_SPLIT, (number, count, len(tensors)), strict=True))
        path = prefix.with_name(f"{prefix.name}-{number + 1:05d}-of-{count:05d}.gguf")
        fields = reader.fields.values() if number == 0 else ()
        _write(path, fields, given, tensors[number * share :][:share])
        paths.append(path)
    return paths


def _write(
    path: Path,
    fields: Iterable[ReaderField],
    given: Mapping[str, str | int],
    tensors: Iterable[tuple[str, ReaderTensor]],
) -> None:
    writer = gguf.GGUFWriter(path, "")  # with a name it would add the key to each part
    for field in fields:
        if not field.name.startswith("GGUF.") and field.name not in given:
            of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of)
    for key, value in given.items():
        number = _OF_A_SPLIT.get(key, GGUFValueType.UINT32)
        writer.add_key_value(key, value, GGUFValueType.STRING if isinstance(value, str) else number)
    for name, tensor in tensors:
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file, with the values of its tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
