"""Models that guess the next tokens of another one, the target: prediction layers, draft heads, and smaller models."""
