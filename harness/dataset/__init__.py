"""Records -> rows and series, as report, compare, history and export read them."""
