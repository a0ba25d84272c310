"""Far stores, which are selected by URL. Hosts of one sharing domain exchange sealed records of their entries
in them."""
