"""Access rules of the service, and its audit log."""
