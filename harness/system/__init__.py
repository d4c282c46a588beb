"""Helpers for all other folders: the cache folder, small kernel files, counts in words."""
