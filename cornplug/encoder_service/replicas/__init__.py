"""Replicas: worker processes that run towers, one for each GPU."""
