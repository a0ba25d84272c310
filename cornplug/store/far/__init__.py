"""Far stores, through which the hosts of one sharing domain (hosts with the same secret) exchange encrypted
records of their entries. The settings select far stores by URL."""
