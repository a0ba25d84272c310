"""Speculative decoding: KV of draft models, and which drafts exclude the sharing of KV."""
