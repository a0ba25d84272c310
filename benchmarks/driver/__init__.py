"""Common parts of the benchmarks: checkpoints, a stock and a cornplug engine side by side, tables."""
