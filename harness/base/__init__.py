"""Used by every folder: files and locks, shipped data files, GPUs as NVML lists them, words for people."""
