"""Key -> bytes, shared by every process of a host. The contract is `base`; `backends` chooses a store."""
