"""Scheduling and admission of encode jobs. Uses neither torch nor I/O."""
