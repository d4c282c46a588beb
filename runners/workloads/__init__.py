"""What is timed, beside a plain decode."""
