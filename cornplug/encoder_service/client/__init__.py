"""Clients of the encoder service, which do not need torch."""
