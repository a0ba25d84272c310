"""Commands of `cornplug` that belong to no room."""
