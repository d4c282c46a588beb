"""Analysis of records: verdicts with reasons, memory, bandwidth, sensors, logits. Pure."""
