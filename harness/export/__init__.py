"""Export ok repeats: as llama-bench's JSON, as CSV, and as Parquet with every token."""
