"""Rows and series as terminal tables and one HTML page, made anew from results alone."""
