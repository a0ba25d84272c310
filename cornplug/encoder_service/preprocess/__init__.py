"""One preprocessor per modality: from a medium's bytes to its digest and the tower's inputs."""
