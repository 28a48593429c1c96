"""Sphinx configuration of the site that `make docs` builds (scripts/docs.py)."""

project = "lmtool"
copyright = "2026, the lmtool authors"
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "deflist"]
html_theme = "furo"
html_title = "lmtool"
html_copy_source = False
html_show_sphinx = False
# The excerpts below search results are fetched page by page, which browsers refuse for files.
html_show_search_summary = False
