"""Whether a server speaks the APIs that it claims to: checks from outside, over HTTP."""
