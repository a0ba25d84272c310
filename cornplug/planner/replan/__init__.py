"""From what engines report to the question whether another plan is worth the change."""
