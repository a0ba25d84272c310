"""Store pages in SGLang's host pools: layout, keys and copies."""
