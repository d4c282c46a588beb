"""What commands do with values in place of options: the functions of `import harness` and what they share."""
