"""Ok repeats in the formats of others: llama-bench's JSON, CSV, and parquet of every token."""
