"""KV events of stored pages for routers, in vLLM's schema and with vLLM's block hashes."""
