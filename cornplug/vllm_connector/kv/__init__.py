"""KV blocks between vLLM and the store."""
