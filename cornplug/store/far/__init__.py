"""Far stores, by URL: hosts of one sharing domain exchange sealed records of their entries there."""
