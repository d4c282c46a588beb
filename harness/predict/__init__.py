"""Predict how fast a variant decodes before it runs, from what was measured of others. Pure."""
