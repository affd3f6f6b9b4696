"""Fast CPU forms of the operations whose reference implementations are slow."""
