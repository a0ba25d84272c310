"""Formats that the service, its clients and the engines share: messages, seals, handles, and decoded images,
videos and audio. Only `tensors` and `audio_resample` use torch."""
