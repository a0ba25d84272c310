"""Decoding of image, video and audio bytes. No torch, but for `audio_resample`."""
