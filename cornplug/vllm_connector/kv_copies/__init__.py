"""Copies of KV between vLLM's cache blocks and the store's pages: memory layouts and transfers."""
