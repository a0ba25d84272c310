"""Metrics, traces and recent history."""
