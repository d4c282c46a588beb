"""Used by every folder: files and locks, GPUs as NVML lists them, words for people."""
