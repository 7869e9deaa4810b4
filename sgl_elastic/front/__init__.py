"""Where requests meet instances: routing, SGLang's messages, readiness."""
