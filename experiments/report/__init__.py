"""Report on runs as one self-contained HTML page.

`results.gather` reads run folders, `tables` and `charts` say what is shown, page.html.jinja and page.css how;
`page` puts it together. Charts are drawn by `plots.inline`; the picture of the curves is `plots.curves`.
"""
