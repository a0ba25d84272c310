"""Transfer of multimodal embeddings between vLLM's encoder cache, the store and the encoder service."""
