"""Encoder service of cornplug: one vision or audio tower that serves every engine, app and model that uses
it.
"""
