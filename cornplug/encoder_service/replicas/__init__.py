"""Towers in processes of their own, one for each GPU."""
