"""Train the model: first from pairs of tokens, which is cheap, then whole, in two processes."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
SEED = 0
WINDOW, BATCH = 1024, 2  # tokens of a sequence, sequences of a step
WARM_UP, DECAY = 20, 0.1
RATES = (2e-3, 6e-4)  # of the layers' matrices (Muon), and of all else (AdamW)
BIGRAM_STEPS, BIGRAM_RATE = 120, 1e-2
SCORED = 512  # windows of the evaluation: the second half of each is scored, as llama-perplexity does
PROCESSES = 2
KEPT_EVERY = 50  # steps; training that was interrupted goes on from there


def train(ids: np.ndarray, held_out: np.ndarray, steps: int, decay: int, folder: Path, state: Path) -> None:
    """Train, and write the checkpoint to `folder`. `decay`: the last steps, in which the rate falls to 0.
    `state`: where training that was interrupted goes on."""
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (ids, held_out, steps, decay, folder, state, f"file://{meeting}/place")
        torch.multiprocessing.spawn(one_process, arguments, PROCESSES)


def say(*words: object) -> None:
    print(*words, flush=True)


def write_model(model: torch.nn.Module, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def one_process(
    rank: int,
    train: np.ndarray,
    held_out: np.ndarray,
    steps: int,
    decay: int,
    folder: Path,
    state: Path,
    meeting: str,
) -> None:
    """Its share of the training; the first writes the model."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    model = trained(train, held_out, steps, decay, state, rank)
    if rank == 0:
        write_model(model, folder)
    distributed.destroy_process_group()


def trained(
    train: np.ndarray, held_out: np.ndarray, steps: int, decay: int, state: Path, rank: int
) -> torch.nn.Module:
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(CONFIG)).float()
    layers = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in layers)]
    optimizers = [
        torch.optim.Muon(layers, lr=RATES[0], weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATES[1], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    first = 0
    if state.exists():
        first, weights, *kept = torch.load(state)
        model.load_state_dict(weights)
        for optimizer, each in zip(optimizers, kept, strict=True):
            optimizer.load_state_dict(each)
    else:
        from_bigrams(model, train, rank)
    if rank == 0:
        say(f"parameters: {sum(p.numel() for p in model.parameters())}; begins at step {first}")
    began, losses = time.monotonic(), []
    for step, whole in enumerate(shuffled(train, steps)):
        if step < first:
            continue
        share = min((step + 1) / WARM_UP, (steps - step) / decay, 1.0)
        for optimizer, rate in zip(optimizers, RATES, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
        batch = torch.from_numpy(whole[rank::PROCESSES])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        average(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        done = step + 1
        if rank == 0 and (done % KEPT_EVERY == 0 or done == steps):
            pace = (time.monotonic() - began) / (done - first)
            mean = sum(losses[-50:]) / len(losses[-50:])
            more = f", held out {evaluated(model, held_out):.2f}" if done % 200 == 0 else ""
            say(f"step {done}/{steps}: training perplexity {math.exp(mean):.2f}{more}, {pace:.2f} s each")
            if done <= steps - decay:
                kept = [optimizer.state_dict() for optimizer in optimizers]
                torch.save([done, model.state_dict(), *kept], state)
    return model


def from_bigrams(model: torch.nn.Module, ids: np.ndarray, rank: int) -> None:
    """Fit embedding and head to the counts of pairs of tokens; layers add nothing at first."""
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    size = CONFIG["vocab_size"]
    counts = np.bincount(ids[:-1] * size + ids[1:], minlength=size * size).reshape(size, size)
    share = torch.from_numpy(counts / counts.sum()).float()
    embedding, norm, head = model.model.embed_tokens.weight, model.model.norm, model.lm_head
    optimizer = torch.optim.Adam([embedding, head.weight], lr=BIGRAM_RATE)
    for step in range(BIGRAM_STEPS):
        optimizer.param_groups[0]["lr"] = BIGRAM_RATE * (1 - step / BIGRAM_STEPS)
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(norm(embedding))
        loss = -(share * functional.log_softmax(logits.float(), dim=1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    if rank == 0:
        say(f"bigrams alone: training perplexity {loss.exp().item():.2f}")


def average(model: torch.nn.Module) -> None:
    """Give all processes the mean of their gradients."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / PROCESSES
    distributed.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def shuffled(ids: np.ndarray, steps: int) -> Iterator[np.ndarray]:
    """Batches of sequences: every epoch cuts the text at other places, in a random order."""
    chance = np.random.default_rng(SEED)
    left: list[int] = []
    for _ in range(steps):
        if len(left) < BATCH:
            first = int(chance.integers(WINDOW))
            left = list(chance.permutation(np.arange(first, len(ids) - WINDOW - 1, WINDOW)))
        places, left = left[:BATCH], left[BATCH:]
        yield np.stack([ids[place : place + WINDOW + 1] for place in places])


@torch.no_grad()
def evaluated(model: torch.nn.Module, ids: np.ndarray) -> float:
    """Perplexity of the second halves of windows of SCORED tokens."""
    windows = torch.from_numpy(ids[: len(ids) // SCORED * SCORED].reshape(-1, SCORED))
    half, total, count = SCORED // 2, 0.0, 0
    for batch in windows.split(8):
        logits = model(input_ids=batch, use_cache=False).logits[:, half:-1].float()
        total += functional.cross_entropy(
            logits.flatten(0, 1), batch[:, half + 1 :].flatten(), reduction="sum"
        ).item()
        count += batch.shape[0] * (half - 1)
    return math.exp(total / count)
