"""FineMoE's tables and figures."""
