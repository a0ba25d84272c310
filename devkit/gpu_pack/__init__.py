"""Engines for a bare GPU machine: one archive that script/gpu-pack builds and script/rehearse-gpu tries."""
