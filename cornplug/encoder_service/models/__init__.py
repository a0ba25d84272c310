"""Registry of served models, and the code that loads them."""
