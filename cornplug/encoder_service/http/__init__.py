"""HTTP API of the encoder service."""
