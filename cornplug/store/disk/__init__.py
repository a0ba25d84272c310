"""The store's disk tier: copies of entries in append-only segments that persist when the daemon ends."""
