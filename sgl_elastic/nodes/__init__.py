"""Several machines: tunnels between their sockets, an agent on each, Ray to place the agents."""
