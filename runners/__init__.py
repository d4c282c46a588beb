"""WORKER: one model in one stack under that stack's own interpreter. Standard library and one stack per
file."""
