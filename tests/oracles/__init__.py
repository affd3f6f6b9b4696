"""Oracles of results: float64 attention, a plain paged runner, transformers' models. On any device."""
