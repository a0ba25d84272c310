"""Order and admission of encode jobs, without torch or I/O."""
