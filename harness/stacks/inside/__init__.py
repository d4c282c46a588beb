"""Scripts that run in the interpreter of a stack: nothing here imports the harness."""
