"""Candidates of a plan: services, paths of requests, replica configurations, and their capacities."""
