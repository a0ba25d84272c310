"""Re-planning: decides from engines' metrics whether a change to another plan pays off."""
