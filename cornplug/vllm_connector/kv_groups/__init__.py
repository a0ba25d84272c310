"""KV of models whose layers are in several of vLLM's cache groups: sliding windows or recurrent states in
addition to full attention."""
