"""KV of models whose layers vLLM keeps in several cache groups: sliding windows or recurrent states beside
full attention."""
