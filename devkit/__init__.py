"""Engines, checkpoints and photographs for tests, benchmarks and the demo. In no wheel."""
