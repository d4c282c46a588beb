"""Models of transformers, for the stacks that run on it."""
