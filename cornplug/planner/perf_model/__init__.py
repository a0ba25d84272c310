"""Performance model of replicas: times, memory, capacities, and simulation of their stations."""
