"""The served models, and how they are loaded."""
