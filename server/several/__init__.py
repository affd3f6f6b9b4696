"""Several models behind one port: each in engine processes and an app of its own, the idle ones asleep."""
