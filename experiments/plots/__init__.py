"""Pictures of results: their content, their drawing, and a run's curves."""

import logging

# At its import Matplotlib would warn users whose home folder cannot be written that its cache is a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
