"""Transfer of KV blocks between vLLM and the store."""
