"""Models: configuration, weights and the decoder."""
