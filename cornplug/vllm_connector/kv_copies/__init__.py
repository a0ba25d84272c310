"""Copies of KV between vLLM's blocks and pages of the store: where bytes lie, and how they cross."""
