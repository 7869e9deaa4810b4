"""Which experts a token will need in the layers to come: FineMoE, its rivals, one protocol."""
