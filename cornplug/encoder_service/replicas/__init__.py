"""Replicas: processes that run towers, one for each GPU."""
