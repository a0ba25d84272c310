"""Identity of the model that SGLang runs, and whether its settings allow sharing."""
