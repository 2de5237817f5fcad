"""What every part may use: files, signals, threads, memory of the machine."""
