"""HTTP: the client of all programs, the server of the master and operator, and liveness probes."""
