"""Discrete-event simulation of requests through stations of replicas: one station, or a whole plan."""
