"""Models: configuration, weights and the decoder. Knows tensors and checkpoints; never knows requests or batches."""
