"""Presentation of a plan: on the terminal and as a page, with the reasons for it."""
