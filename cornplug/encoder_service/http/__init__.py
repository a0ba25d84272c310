"""The service's HTTP API."""
