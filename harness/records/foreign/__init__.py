"""Logs of other tools -> per-token series; one reader per format."""
