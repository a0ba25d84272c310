"""First plan input: a complete, commented TOML file from a model's name and a list of GPUs."""
