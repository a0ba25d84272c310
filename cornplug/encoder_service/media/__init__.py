"""Decoding of image, video and audio bytes. Only `audio_resample` uses torch."""
