"""Clients of the encoder service. They do not need torch."""
