"""Memory and least time of a model on a machine, before anything runs. Pure: values in, values out."""
