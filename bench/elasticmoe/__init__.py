"""ElasticMoE's tables and figures."""
