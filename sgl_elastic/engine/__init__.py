"""The engine's side, inside SGLang's scheduler processes: weights and KV that belong to the HMM."""
