"""Replicas of the engine: their processes, messages, supervision, and the routing of requests to them."""
