"""Command lines for a deployment's processes, and a launcher for the processes of one host."""
