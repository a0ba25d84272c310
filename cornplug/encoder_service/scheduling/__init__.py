"""Order and admission of encode jobs: pure decisions, no torch, no I/O."""
