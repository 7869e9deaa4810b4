"""The paper's other ways to scale, over the same verbs."""
