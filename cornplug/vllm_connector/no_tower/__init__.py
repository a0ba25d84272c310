"""Engines without a tower, whose image embeddings are all computed by the encoder service."""
