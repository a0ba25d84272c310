"""The daemon that owns a host's store, with one process and one arena."""
