"""What the arithmetic says before anything runs. Pure: values in, values out."""
