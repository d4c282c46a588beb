"""Where weights come from (a path, the hub, synthesized), their names in the cache, their fingerprints."""
