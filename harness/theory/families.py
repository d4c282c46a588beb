"""Shapes of common model families by name, from the config.json of each in data/models.json. Pure.

A name stands for the base model as the hub has it (Qwen3: the one without a suffix). `vocab_size` is the rows
stored, padding included: Qwen2's are 151,936 in small models and 152,064 in large ones. Qwen1.5: all untied,
as in the published tables and the GGUF files (on the hub 0.5B ties its embeddings). -mha: without GQA, which
the published study lists besides the real ones. The tiny ones are for tests and first tries: their speed is
meaningless.
"""

from __future__ import annotations

import json

from harness import data
from harness.theory.hf_config import shape_of
from harness.theory.shapes import Shape

SHAPES: dict[str, Shape] = {
    name: shape_of(config) for name, config in json.loads(data.text("models.json")).items()
}
