"""cornplug: engines share what they compute, keyed by what it was computed from."""

__version__ = "0.1.0"
