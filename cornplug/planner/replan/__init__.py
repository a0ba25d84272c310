"""Re-planning, which decides from engines' metrics whether changing to another plan is worthwhile."""
