"""Sharing of KV for models whose layers are in several of vLLM's cache groups: full attention with sliding
windows or recurrent states."""
