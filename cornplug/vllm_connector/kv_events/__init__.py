"""KV events of stored pages, for routers: in vLLM's schema, with vLLM's names of blocks."""
