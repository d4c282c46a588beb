"""The registry of stacks: one file a stack, named as in configs, with its header."""
