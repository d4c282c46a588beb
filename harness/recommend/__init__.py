"""Which stack and quantization to run on a machine, from what was measured and what memory allows."""
