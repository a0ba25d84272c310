"""SGLang's encoder-disaggregation protocol, served by the same encoder service."""
