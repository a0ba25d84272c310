"""Requests through stations of replicas, event by event: one station, or a whole plan."""
