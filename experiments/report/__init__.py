"""Report on runs as one self-contained HTML page.

`folder.stored_runs` reads run folders, `tables` and `charts` say what is shown, page.html.jinja and page.css how;
`page` puts it together. Charts are drawn by `show.pictures`; the picture of the curves is `show.curves`.
"""
