"""Settings of the documentation site. `make docs` builds it with warnings as errors."""

from __future__ import annotations

project = "mirage_hf"
author = "the mirage_hf authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "mirage_hf"
exclude_patterns = ["benchmarks/raw"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False
