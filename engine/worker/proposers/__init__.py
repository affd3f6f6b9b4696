"""Proposers: they guess the next tokens of requests, see `engine.core.drafts.proposer`."""
