"""Inputs of a plan: the TOML file, and the tables and checkpoints that it names."""
