"""Admission and execution of requests, up to the reply and the stored embedding."""
