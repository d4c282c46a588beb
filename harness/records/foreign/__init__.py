"""Logs of other tools -> per-token series and totals; `formats.py` has a row for each."""
