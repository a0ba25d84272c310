"""Transfer of KV between vLLM's blocks and the store's pages: the scheduler half and the worker half."""
