"""Copies of KV between vLLM's blocks and pages of the store: memory layouts and transfers."""
