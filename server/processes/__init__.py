"""Several API processes behind one address and before one engine."""
