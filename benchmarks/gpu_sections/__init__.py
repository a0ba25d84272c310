"""Sections of script/test-gpu: what is measured on a GPU machine, one module a subject."""
