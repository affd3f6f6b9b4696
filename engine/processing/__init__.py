"""Input and output of requests: prompts to engine requests, sampled tokens to results."""
