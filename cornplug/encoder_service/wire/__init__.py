"""Messages on the service's unix socket. Clients and engines import it."""
