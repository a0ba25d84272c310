"""Speculative decoding: KV of draft models, and draft settings that exclude KV sharing."""
