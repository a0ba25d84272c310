"""A plan for people: on the terminal, as a page, with its reasons."""
