"""Candidates for a plan: services, paths of requests, and replica configurations with their capacities."""
