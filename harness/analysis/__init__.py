"""What is said about records: figures, their intervals, verdicts. Pure: records in, values out."""
