"""The timed workloads other than a plain decode."""
