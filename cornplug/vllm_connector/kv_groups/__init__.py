"""KV of models whose layers vLLM keeps in several cache groups: sliding windows beside full attention."""
