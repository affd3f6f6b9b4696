"""Data types and arithmetic that all backends share: step layout, plans, weights. No kernel."""
