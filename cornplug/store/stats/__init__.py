"""What a store tells of itself."""
