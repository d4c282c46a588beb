"""What a config.json describes, as layers: every architecture that the theory knows. Pure.

The file is not trusted: for any content the result is a Decoder or a ConfigJsonError. Layers, defaults and
biases: configuration_*.py and modeling_*.py of transformers 5.23.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from harness.theory import decoder
from harness.theory.architectures import attention, hybrids
from harness.theory.architectures.values import Build, Values
from harness.theory.decoder import Decoder
from harness.theory.hf_config import DENSE, ConfigJsonError, NoShape, mapping, shape_of, shown

_BUILD: dict[str, Build] = {
    **attention.DENSE_BUILD,
    **attention.MIXTURES_BUILD,
    **attention.LATENT_BUILD,
    **hybrids.BUILD,
    **attention.GEMMA3N_BUILD,
}
KINDS = tuple(sorted({*DENSE, *_BUILD}))
"""All known model_type, without those of wrappers."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# How deep a text model may lie in the config.json of a model for text and images.
_WRAPPERS = ("text_config", "llm_config", "language_config")


def decoder_of(config: Mapping[str, object]) -> Decoder:
    """The decoder for text that a config.json describes, or the one inside a wrapper.

    Raises ConfigJsonError: a missing number without a default, a contradiction; NoShape: an architecture that
    is not known, with the nearest that is.
    """
    config = mapping(config, "config.json")
    kind, text = text_model(config)
    if kind in _BUILD:
        return _BUILD[kind](Values(kind, text, config))
    return decoder.of_shape(shape_of(config))


def text_model(config: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """The model_type and the part of a config.json of the model for text. Raises ConfigJsonError."""
    kind = config.get("model_type")
    for key in _WRAPPERS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            nested = inner.get("model_type")
            if isinstance(nested, str) and nested in (*DENSE, *_BUILD):
                return nested, inner
            if isinstance(nested, str):
                raise _unknown(nested)
    if isinstance(kind, str) and kind in (*DENSE, *_BUILD):
        return kind, config
    if not isinstance(kind, str):
        if kind is None and _names_known(config) and not any(config.get(key) for key in _EXPERTS):
            return "llama", config  # hf_config finds the kind by the architectures
        problem = "is missing" if kind is None else f"{shown(kind)} is not known"
        raise ConfigJsonError(f"model_type {problem}; known: {', '.join(KINDS)}")
    raise _unknown(kind)


def _names_known(config: Mapping[str, object]) -> bool:
    return isinstance(config.get("architectures"), list)


def _unknown(kind: str) -> NoShape:
    near = difflib.get_close_matches(kind[:40], KINDS, 1, 0.6)
    return NoShape(
        f"architecture {shown(kind)} is not known" + (f"; the nearest that is: {near[0]}" if near else "")
    )
