"""Formats that the service shares with its clients and engines: messages, seals, handles and files."""
