"""Pictures of results: what is in them, how they are drawn, and a run's curves."""
