"""Which model this vLLM runs, and whether its settings let it share."""
