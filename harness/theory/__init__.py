"""Memory and speed estimates before a run. Pure: values in, values out."""
