"""Results from records: figures, their intervals, verdicts. Pure: records in, values out."""
