"""The HMM: processes that own weights and KV, one a device, and what talks to them."""
