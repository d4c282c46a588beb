"""Runners' headers and the interpreters built from them."""
