"""Transfer of KV between vLLM's blocks and the store's pages, for the scheduler and the workers."""
