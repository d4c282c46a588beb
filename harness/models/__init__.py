"""Weights and the files that hold them: GGUF, checkpoints, the hub, synthetic ones; names in the cache."""
