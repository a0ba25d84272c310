"""Transfer of embeddings between SGLang's requests, the store and the encoder service."""
