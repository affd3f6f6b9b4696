"""Proposers: they draft the next tokens of requests, see `engine.core.drafts.proposer`."""
