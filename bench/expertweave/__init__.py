"""ExpertWeave's tables and figures."""
