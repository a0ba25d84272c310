"""Re-planning: decides from engines' metrics whether changing to another plan is worthwhile."""
