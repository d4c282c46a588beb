"""Results for others, and from them: bundles, their checks, formats of other tools."""
