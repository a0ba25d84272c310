"""Admission and execution of requests, up to the stored embedding and the reply."""
