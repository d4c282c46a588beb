"""Engines behind a server, over HTTP: greedy tokens streamed to one client."""
