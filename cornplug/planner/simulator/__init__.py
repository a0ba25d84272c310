"""Discrete-event simulation of requests that visit stations of replicas: one station, or a complete plan."""
