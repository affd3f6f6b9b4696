"""Drafts: tokens that a proposer guesses ahead of a request, and that one step verifies."""
