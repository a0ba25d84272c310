"""Sections of the settings. `cornplug.config` merges their places and offers all of them."""
