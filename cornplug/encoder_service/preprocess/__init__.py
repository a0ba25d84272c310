"""Preprocessors, one per modality. They turn a medium's bytes into its digest and the tower's inputs."""
