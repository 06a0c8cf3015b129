"""What this machine and its control groups let the process use: memory, processors, huge pages."""
