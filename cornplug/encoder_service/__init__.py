"""cornplug's encoder service: one tower for every engine, app and model that has it."""
