"""Reads without a message: the table of entries that the daemon writes and clients map, and their notes."""
