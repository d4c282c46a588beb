"""What every folder uses: files and locks, GPUs as NVML lists them, words for people."""
