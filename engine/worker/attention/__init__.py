"""Step data of attention by kind."""
