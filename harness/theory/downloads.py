"""Where the weights of known models are published: tags of Ollama's, repositories of the hub. Pure."""

from __future__ import annotations


def commands(name: str) -> list[str]:
    return []
