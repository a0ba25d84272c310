"""Which model this SGLang runs, and whether its settings let it share."""
