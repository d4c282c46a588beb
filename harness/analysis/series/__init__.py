"""Statistics of series: lines, shapes, intervals, spread, steps. Pure; nothing here knows records."""
