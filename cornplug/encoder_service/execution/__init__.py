"""From an admitted request to a stored embedding."""
