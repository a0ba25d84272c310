"""Pages of the store as SGLang has them in its host pools: their layout, keys and copies."""
