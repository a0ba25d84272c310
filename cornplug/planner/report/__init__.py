"""Presentation of a plan on the terminal and as an HTML page, with the reasons for its decisions."""
