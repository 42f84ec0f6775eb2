"""Worker threads and what they work with: memory that is reused, calls that survive interrupts, log lines."""
