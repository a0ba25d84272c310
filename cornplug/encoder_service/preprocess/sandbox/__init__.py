"""Decoding in separate processes, so that untrusted bytes can harm only the process that decodes them."""
