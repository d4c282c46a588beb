"""What is said about records. Pure: Records and series in, values out."""
