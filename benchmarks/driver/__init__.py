"""What the benchmarks share: checkpoints, a stock and a cornplug engine side by side, tables."""
