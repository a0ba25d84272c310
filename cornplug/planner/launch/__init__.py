"""From a plan to processes: command lines, and a launcher of one host's."""
