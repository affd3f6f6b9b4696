"""The parts that `Engine` is made of: what each does before, in and after a step."""
