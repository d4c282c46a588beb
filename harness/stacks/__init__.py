"""The headers of stacks, and the interpreters that stacks run under: built or adopted."""
