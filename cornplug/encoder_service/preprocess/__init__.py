"""Preprocessors for each modality. They compute a media item's digest and the tower's inputs from its
bytes."""
