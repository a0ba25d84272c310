"""What tests, benchmarks and the demo start and feed: engines, checkpoints, photographs. In no wheel."""
