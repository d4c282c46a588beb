"""Rows and series -> what a person reads: a terminal table, one HTML page. Rebuilt from results/ alone."""
