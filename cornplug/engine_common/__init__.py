"""Code shared by the vLLM and SGLang plugins: settings, identities, policies and the connection to the
store."""
