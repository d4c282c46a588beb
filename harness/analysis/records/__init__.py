"""What records say: verdicts and their reasons, memory, bandwidth, sensors, agreement. Pure."""
