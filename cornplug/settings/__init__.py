"""Sections of the settings. `cornplug.config` loads and exports all of them."""
