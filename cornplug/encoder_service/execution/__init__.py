"""Execution of admitted requests, up to the stored embedding."""
