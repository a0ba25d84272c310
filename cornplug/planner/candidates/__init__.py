"""From the input to a plan: what could run where, the problem, its solution, the rehearsal."""
