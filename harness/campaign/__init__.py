"""Measure what a config names, and keep every attempt."""
