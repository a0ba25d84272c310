"""Inputs of a plan: the TOML file, and the tables and checkpoints to which it refers."""
