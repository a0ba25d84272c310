"""Fingerprints and identities of checkpoints."""
