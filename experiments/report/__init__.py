"""Runs as one HTML page that needs nothing else, and as a picture of their curves.

`gather` reads run folders, `tables` and `charts` say what is shown, `svg` and `markup` how it is written,
`page` puts it together; `curves` is the picture.
"""
