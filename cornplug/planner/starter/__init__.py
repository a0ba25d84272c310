"""A first plan input: from a model's name and a list of GPUs to a complete, commented TOML file."""
