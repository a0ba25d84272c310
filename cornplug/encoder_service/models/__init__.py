"""Which models the service holds, and how they are loaded."""
