"""An engine without a tower: the encoder service computes the embeddings of all its images."""
