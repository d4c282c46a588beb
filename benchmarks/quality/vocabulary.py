"""A GGUF with the vocabulary of a byte-level BPE tokenizer.json. Runs under llamacpp's interpreter.

llama-perplexity tokenizes the text itself, so its GGUF needs one; the harness converts without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf.constants import Keys


def main(source: Path, tokenizer: Path, target: Path) -> None:
    """Copy the GGUF `source`, and add the vocabulary of `tokenizer` (its pre-tokenizer: that of GPT-2)."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, arch=reader.fields[Keys.General.ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == Keys.General.ARCHITECTURE:
            continue
        kind = field.types[0]
        inside = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inside)
    model = json.loads(tokenizer.read_text(encoding="utf-8"))
    special = {each["id"] for each in model["added_tokens"] if each["special"]}
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(pairs)
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
