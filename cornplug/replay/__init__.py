"""Replay of request traces against the store's rules: the savings of another size or other namespaces."""
