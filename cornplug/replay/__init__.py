"""Replay of recorded request traces with the store's policy, to predict the savings of another store size or
other namespaces."""
