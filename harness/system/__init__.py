"""What every other folder may use: the cache folder, the kernel's small files, a count in words."""
