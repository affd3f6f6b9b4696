"""Images of requests: where they come from, and how their pixels become the patches that an encoder reads."""
