"""Clients of the service. No torch."""
