"""Pictures of results: their content, their drawing, and a run's curves."""
