"""Report on runs as one self-contained HTML page.

`results.gather` reads run folders, `tables` and `charts` say what is shown, `svg` and `markup` how it is written,
`page` puts it together; the picture of their curves is `plots.curves`.
"""
