"""Share results: bundle them in one file without what identifies a person, and verify a stranger's bundle."""
