"""A worker's life: start it, bound and sample its memory, read its events, see it end."""
