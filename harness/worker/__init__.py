"""Start a worker, limit and sample its memory, read its events, and wait until it ends."""
