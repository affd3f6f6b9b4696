"""Settles what a configuration leaves open, for the model and the machine: options, drafter, memory plan."""
