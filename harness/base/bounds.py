"""Bounds on what comes from outside: a stranger's files and queries. Each has its reason."""

# The page of `report --serve`.

IDLE_S = 30.0  # of a connection on which nothing is asked or read: each holds a thread

# A query of `harness sql`, and its answer.

QUERY_S = 60.0  # by default: until its answer is ready to be printed
QUERY_ENDS_S = 30.0  # more, for a function that DuckDB does not interrupt (list_sort): then the command ends
QUERY_BYTES = 2 << 30  # of memory beyond what the command has: with DuckDB, its answer and its text
ENGINE_BYTES = QUERY_BYTES // 2  # of these, DuckDB's own: a sort of 60 million numbers
ANSWER_BYTES = 256 << 20  # of text or Parquet: two million tokens with all of their columns
TABLE_VALUES = 1_000_000  # of a table in the terminal: 2 s until its columns are aligned
