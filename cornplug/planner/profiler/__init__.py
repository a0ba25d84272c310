"""`cornplug profile`: measures a component's times on this machine."""
