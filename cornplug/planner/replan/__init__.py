"""From engines' metrics to the decision whether another plan is worth the change."""
