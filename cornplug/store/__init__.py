"""Store of bytes by key, shared by all processes of a host. `base` has the contract, `backends` selects a
store."""
