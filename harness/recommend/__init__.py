"""Which stack and quantization to run on a machine: predicted from what was measured, ranked, and proved."""
