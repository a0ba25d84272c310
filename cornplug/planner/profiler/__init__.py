"""`cornplug profile`: a component's times on this machine."""
