"""Served models, and their loading."""
