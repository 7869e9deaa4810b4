"""When to scale: service levels, the policy, and the loop that asks it."""
