"""Expert-specialised fine-tuning of a real base: examples in, scores or an adapter out."""
