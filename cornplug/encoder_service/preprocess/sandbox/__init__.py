"""Decoding in separate processes: a stranger's bytes can harm only their own decoder."""
