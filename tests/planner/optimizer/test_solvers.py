"""HiGHS, called again and again in one process."""

from __future__ import annotations

import pulp

from cornplug.planner.optimizer.solvers import SolverLimits, relax, solve


def program() -> pulp.LpProblem:
    """Least whole number that is no less than 2.5."""
    problem = pulp.LpProblem("whole", pulp.LpMinimize)
    x = problem.add_variable("x", 0, 10, pulp.LpInteger)
    problem.setObjective(1 * x)
    problem.addConstraint(x >= 2.5)
    return problem


def test_solve_with_another_number_of_threads_is_solved() -> None:
    for threads in (2, 1, 2):
        run = solve(program(), SolverLimits(0.0, 60.0, threads))
        assert (run.status, run.objective) == ("optimal", 3.0)
        relaxed = program()
        relax(relaxed)
        assert relaxed.objective.value() == 2.5
