"""The way into SGLang: its plugin's entry point, the hooks, and what stands in LoRA's place."""
