"""Bounds on what comes from outside: files, bundles, queries, servers' pages, and what nodes of a fleet send.
Each has its reason; docs/reference/security.md lists them with their tests.

The bounds on a server's answers are in runners/answers.py, as the worker needs them too.
"""

# Records, their series and the other files of a results folder.
RECORD_BYTES = 12 << 20  # 11 MB of prompt: a million tokens
RECORD_NAMES = 100_000  # of one object; the modules of a mixture with experts of their own are 70,000
JSON_DIGITS = 20  # of an unsigned 64-bit number
SERIES_BYTES = 64 << 20  # of a table in parquet, as stored and unpacked; the longest takes less
SERIES_VALUES = 1 << 22  # for a million tokens: an integer of each in four columns
SERIES_COLUMNS = 1000  # a table of the harness has 7
SERIES_PAGES = 10_000  # each header is decoded in Python before any page is
SERIES_NAME_BYTES = 1 << 20  # of a text in its footer, such as the schema
EVENTS_BYTES = 256 << 20  # of a repeat whose controller died; a million tokens take 30 MB

# Bundles of results. A campaign of 150 cells with 3 repeats of 10,000 tokens takes about 30 MB, unpacked.
BUNDLE_PACKED_BYTES = 48 << 20
BUNDLE_BYTES = 96 << 20  # unpacked
BUNDLE_MEMBERS = 20_000  # eight a record at most
BUNDLE_VALUES = 1 << 24  # of all tables: 500 repeats of 10,000 tokens
BUNDLE_DEPTH = 100  # of a record's JSON; those of the harness nest 6 deep

# Logs of other tools, and of a wall meter.
LOG_BYTES = 32 << 20  # also when decompressed
LOG_VALUES = 1_500_000  # a column of text, or a number of JSON, takes up to 100 bytes of memory
LOG_STARTS = 16  # lines that may begin a JSON document behind lines of standard error
TABLE_COLUMNS = 1000  # of a CSV file or of JSON objects
TABLE_CELLS = 1 << 22  # an empty one takes memory too
POWER_LOG_BYTES = 256 << 20  # these lines, each with a time in ISO 8601
POWER_LOG_LINES = 7_000_000  # a week of ten a second

# Configs, and the user's list of machines.
CONFIG_BYTES = 1 << 20  # the largest shipped config has 6 kB
CONFIG_DEPTH = 20  # shipped configs nest 5 deep
CONFIG_VALUES = 10_000  # the largest shipped config has about 100; PyYAML takes about 0.1 ms a value
CONFIG_CELLS = 10_000  # more is a mistake in a matrix: at a minute each, a week
MACHINES_BYTES = 1 << 20  # the shipped list has 0.1 MB

# Models: headers, indexes, config.json, and tokenizers.
CONFIG_JSON_BYTES = 1 << 20  # a config.json has a few kB
MODEL_LAYERS = 10_000  # each is made, and counted
GGUF_HEADER_BYTES = 256 << 20  # vocabularies of 256k tokens with their merges take 10 to 20 MB
GGUF_STRING_BYTES = 1 << 20  # a chat template has some 10 kB
GGUF_PARTS = 1000  # 1 TB in parts of 1 GB
# The safetensors library's own bound is 100 MB. A header of 4 MiB takes up to 0.19 GB of memory. A tensor has
# 130 bytes: the 1,138 of 405B are 150 kB, and 30,000 fit.
SAFETENSORS_HEADER_BYTES = 4 << 20
SAFETENSORS_HEADERS_BYTES = 16 << 20  # of all shards together; 405B has 150 kB
SAFETENSORS_INDEX_BYTES = 4 << 20  # 110 bytes a tensor: 38,000 of them
SAFETENSORS_SHARDS = 1000  # each header is a file to open
SAFETENSORS_TENSORS = 100_000  # 405B has 1,138
TOKENIZER_BYTES = 2 << 30  # of memory; 33 MB of tokenizer.json, the largest known, take 0.3 GB
TOKENIZER_S = 60  # of CPU time, not of wall time: the machine may be busy

# The text that quality is scored on, and a reference for it.
TEXT_BYTES = 64 << 20  # all of it is tokenized
REFERENCE_DESCRIPTION_BYTES = 4 << 20  # three hashes, versions and options
REFERENCE_BYTES = 8 << 30  # of an array, and of all references in the cache

# A query of `harness sql`, and its answer.
QUERY_S = 60.0  # by default: until its answer is ready to be printed
QUERY_ENDS_S = 3.0  # more, for a function that DuckDB does not interrupt (list_sort): then the command ends
QUERY_BYTES = 2 << 30  # of memory beyond what the command has: with DuckDB, its answer and its text
QUERY_ENGINE_BYTES = QUERY_BYTES // 2  # of these, DuckDB's own: a sort of 60 million numbers
QUERY_ANSWER_BYTES = 256 << 20  # of text or Parquet: two million tokens with all of their columns
QUERY_TABLE_VALUES = 1_000_000  # of a table in the terminal: 2 s until its columns are aligned

# The page, and `report --serve`.
PAGE_FACTS = 5000  # values of a protocol or a machine that are listed; of a record they are about 100

SERVE_IDLE_S = 30.0  # of a connection on which nothing is asked or read: each holds a thread

# What a node of a fleet sends.
MESSAGE_BYTES = 64 << 20  # of a line: the record of a million tokens takes 39 MB in base64

# Pages of a package index, and the first answer of the model hub.
PACKAGES_BYTES = 64 << 20  # the longest page of PyPI has 20 MB
PACKAGES_S = 60.0  # between two pieces of a page
HUB_S = 5.0  # the library alone would retry six times, 23 s in all
