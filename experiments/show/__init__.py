"""Results for people: pictures and their drawing, tables, and pages from templates."""

import logging

# When it is imported, Matplotlib would warn of a temporary cache if the home folder cannot be written.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
