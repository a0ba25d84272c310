"""Exchange of KV pages between SGLang's hierarchical cache and the store."""
