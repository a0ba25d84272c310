"""The optimisation problem, its solution, and the explanation of infeasible problems.

This package does not depend on an engine or a GPU.
"""
