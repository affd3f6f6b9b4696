"""What results are compared with: float64 attention, a plain paged runner, transformers' models. On any device."""
