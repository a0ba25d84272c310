"""A model on disk, as identities of its parts."""
