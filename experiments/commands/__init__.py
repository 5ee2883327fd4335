"""What the commands of many runs and of finished ones share and make; each is a page of its name above."""
