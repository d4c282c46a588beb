"""Choose the stack and quantization for a machine, from measurements and memory limits."""
