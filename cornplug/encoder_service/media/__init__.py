"""Decoders for image, video and audio bytes. Only `audio_resample` uses torch."""
