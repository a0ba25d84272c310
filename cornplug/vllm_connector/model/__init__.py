"""Identity of the model that vLLM runs, and whether its settings allow sharing."""
