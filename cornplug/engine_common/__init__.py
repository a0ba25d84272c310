"""What an engine's process needs of cornplug whatever the engine: settings, identity, connections."""
