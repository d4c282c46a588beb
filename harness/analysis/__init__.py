"""Analysis of records and series. Pure: values in, values out."""
