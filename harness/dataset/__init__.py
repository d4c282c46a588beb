"""Records -> rows and series for report, compare, history and export."""
