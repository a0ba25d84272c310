"""Store of bytes by key, shared by all processes of a host.

`base` defines the contract, and `backends` selects an implementation.
"""
