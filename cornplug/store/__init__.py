"""Identity -> bytes, shared by every process of a host. The seam is `base`; `pool` is the default."""
