"""The memory, processors and huge pages that this machine and its control groups let the process use."""
