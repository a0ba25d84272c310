"""Implementation of `cornplug profile`, which measures a component's times on this machine."""
