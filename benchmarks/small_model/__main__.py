"""Train the small model that ships with the harness, and compare it with n-grams of the same tokens.

A Qwen2 of 3.6 million parameters over 2,048 byte-level BPE tokens, trained on five of Jane Austen's novels
and two thirds of a sixth, whose end is held out. Seeds are fixed; another CPU or version of PyTorch rounds
differently, so a repetition gives a model as good, and not the same bits.

    PYTHONPATH=. INTERPRETER -m benchmarks.small_model FOLDER [--archive DEB] [--steps 2200] [--decay 1600]

INTERPRETER: of the stack hf, which has torch and transformers (`harness env list` names its folder).
FOLDER gets the checkpoint and its README.md, the folder above it held-out.txt. About 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from benchmarks.small_model import ngram, novels, training

END = "<|endoftext|>"
ORDERS = 5
README = """# {name}
A Qwen2 of {parameters:,} parameters, made by `benchmarks/small_model` from Jane Austen's novels, as Debian's
{package} {version} (MIT license) has them. The novels are in the public domain (their author
died in 1817), and so is `held-out.txt`, the end of Persuasion, which was held out. The weights: CC0."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", type=Path, help=f"{novels.PACKAGE}_{novels.VERSION}_all.deb")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--decay", type=int, default=1600, help="last steps, in which the rate falls to 0")
    parser.add_argument("--state", type=Path, help="keep the state of training here, and go on from there")
    given = parser.parse_args()
    texts, held_out = novels.read(given.archive)
    given.folder.mkdir(parents=True, exist_ok=True)
    text = given.folder.parent / "held-out.txt"
    text.write_text(held_out, encoding="utf-8", newline="\n")
    tokenizer = trained_tokenizer(texts)
    write_tokenizer(tokenizer, given.folder)
    train = np.concatenate([[0, *tokenizer.encode(text).ids] for text in texts]).astype(np.int64)
    ids = np.array(tokenizer.encode(held_out).ids, np.int64)
    with tempfile.TemporaryDirectory() as temporary:
        state = given.state or Path(temporary) / "state.pt"
        training.train(train, ids, given.steps, given.decay, given.folder, state)
    write_readme(given.folder, train, ids, given.steps, given.decay)


def write_readme(folder: Path, train: np.ndarray, ids: np.ndarray, steps: int, decay: int) -> None:
    """What the model is, how good as stored, the n-grams' perplexity, and the hashes of its files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    baseline = ngram.perplexities(train, ids, training.CONFIG["vocab_size"], ORDERS)
    files = [*sorted(folder.glob("*.json")), folder / "model.safetensors", folder.parent / "held-out.txt"]
    hashes = [
        f"| {path.name} | {path.stat().st_size:,} | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |"
        for path in files
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = [
        README.format(name=folder.name, parameters=count, package=novels.PACKAGE, version=novels.VERSION),
        f"Trained on {len(train):,} tokens, {steps} steps of {training.WINDOW * training.BATCH:,}, the rate"
        f" falling in the last {decay}. Held out: {len(ids):,} tokens.",
        f"Perplexity of the held-out text (second halves of windows of {training.SCORED} tokens), computed in"
        f" float32: **{training.evaluated(model, ids):.2f}**. Interpolated Kneser-Ney n-grams of the same"
        f" tokens: {', '.join(f'{each:.2f} (n = {n})' for n, each in enumerate(baseline, 1))}.",
        "\n".join(["| file | bytes | SHA-256 |", "| --- | --- | --- |", *hashes]),
    ]
    whole = "\n\n".join(parts) + "\n"
    (folder / "README.md").write_text(whole, encoding="utf-8")
    print(whole)


def trained_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = training.CONFIG["vocab_size"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": training.WINDOW,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
