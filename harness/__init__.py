"""CONTROLLER: decides, records, analyses and draws. Never imports a stack."""

__version__ = "0.1.0"
