"""Launch of a plan: command lines, and a launcher for the processes of one host."""
