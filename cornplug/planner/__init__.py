"""Computes a plan and its launch commands from components, applications, SLOs and a GPU price list."""
