"""Code that both plugins share: settings, identities, policies and the connection to the store."""
