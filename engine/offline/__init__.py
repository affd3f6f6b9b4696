"""The offline API: the LLM class and the loop that runs its jobs."""
