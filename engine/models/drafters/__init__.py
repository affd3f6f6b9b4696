"""Models that draft the next tokens of another one, the target: prediction layers, draft heads, and smaller models."""
