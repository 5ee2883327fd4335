"""Results for people: pictures and their drawing, tables, and pages from templates."""

import logging

# At its import Matplotlib would warn users whose home folder cannot be written that its cache is a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
