"""Who may ask the service, and the record of it."""
