"""Subcommands of `cornplug` that do not belong to another package."""
