"""Weights on disk: read, made, packed."""
