"""Decoding in separate processes, so that untrusted bytes can harm only their own decoder."""
