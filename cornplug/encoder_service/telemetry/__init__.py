"""Metrics and traces of the encoder service."""
