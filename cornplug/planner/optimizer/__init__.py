"""The optimisation problem, its solvers, and why there may be no solution.

No engine and no GPU is known here.
"""
