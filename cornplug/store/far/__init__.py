"""Far stores, selected by URL, in which hosts of one sharing domain exchange sealed records of their
entries."""
