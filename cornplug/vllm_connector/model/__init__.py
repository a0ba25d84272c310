"""Identities of the model that vLLM runs, and checks whether its settings allow sharing."""
