"""Logs of other tools -> series of one token's latency each, by one reader a format."""
