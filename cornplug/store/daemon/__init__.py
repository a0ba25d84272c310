"""The daemon that owns a host's store: one process, one arena."""
