"""llama.cpp, for its stack."""
