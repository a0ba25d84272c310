"""Who is encoded when, and who is refused: pure decisions, no torch, no I/O."""
