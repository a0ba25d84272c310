"""Command lines for a plan's processes, and a launcher for the processes of one host."""
