"""Turn a config.json into layers: every architecture that the theory knows. Pure.

The file is not trusted: for any content the result is a Decoder or a ConfigJsonError. Layers, defaults and
biases: configuration_*.py and modeling_*.py of transformers 5.23.
"""

from __future__ import annotations

import difflib

from harness.theory.architectures import attention, gemma3n, hybrids, latent, mixtures
from harness.theory.config_settings import (
    Build,
    ConfigJsonError,
    NoShape,
    Settings,
    Values,
    settings_of,
    shown,
)
from harness.theory.decoder import Decoder
from harness.theory.hf_config import DENSE, EXPERTS, dense_kind, dense_of

_BUILD: dict[str, Build] = {
    **dict.fromkeys(DENSE, dense_of),
    **attention.DENSE_BUILD,
    **mixtures.MIXTURES_BUILD,
    **latent.LATENT_BUILD,
    **hybrids.BUILD,
    **gemma3n.GEMMA3N_BUILD,
}
KINDS = tuple(sorted(_BUILD))
"""All known model_type, without those of wrappers."""

# How deep a text model may lie in the config.json of a model for text and images.
_WRAPPERS = ("text_config", "llm_config", "language_config")
_TIED = "tie_word_embeddings"


def decoder_of(config: object) -> Decoder:
    """The decoder for text that a config.json describes, or the one inside a wrapper.

    Raises ConfigJsonError: a missing number without a default, a contradiction; NoShape: an architecture that
    is not known, with the nearest that is.
    """
    whole = settings_of(config, "config.json")
    kind, text = text_model(whole)
    ties = [part[_TIED] for part in (text, whole) if part.get(_TIED) is not None]
    stated = {key: value for key, value in text.items() if key != _TIED}  # null is as good as missing
    return _BUILD[kind](Values(stated | ({_TIED: ties[0]} if ties else {}) | {"model_type": kind}))


def text_model(config: object) -> tuple[str, Settings]:
    """The model_type and the part of a config.json of the model for text. Raises ConfigJsonError."""
    whole = settings_of(config, "config.json")
    kind = whole.get("model_type")
    for inner in filter(None, map(whole.inner, _WRAPPERS)):
        nested = inner.get("model_type")
        if isinstance(nested, str) and nested in _BUILD:
            return nested, inner
        if isinstance(nested, str):
            raise _unknown(nested)
    if kind is None and not any(map(whole.get, EXPERTS)):
        kind = dense_kind(whole)
    if isinstance(kind, str) and kind in _BUILD:
        return kind, whole
    if not isinstance(kind, str):
        problem = "is missing" if kind is None else f"{shown(kind)} is not known"
        raise ConfigJsonError(f"model_type {problem}; known: {', '.join(KINDS)}")
    raise _unknown(kind)


def _unknown(kind: str) -> NoShape:
    near = difflib.get_close_matches(kind[:40], KINDS, 1, 0.6)
    return NoShape(
        f"architecture {shown(kind)} is not known" + (f"; the nearest that is: {near[0]}" if near else "")
    )
