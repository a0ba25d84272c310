"""Decoding in processes of its own: what a stranger's bytes can do to a decoder, they do to nobody else."""
