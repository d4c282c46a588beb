"""Rows and series -> terminal tables and one HTML page. Rebuilt from results/ alone."""
