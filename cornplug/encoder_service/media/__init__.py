"""Encoded media, decoded: what image, video and audio bytes stand for. No torch."""
