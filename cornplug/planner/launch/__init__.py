"""From a plan to processes: command lines, scripts, and a one-host launcher."""
