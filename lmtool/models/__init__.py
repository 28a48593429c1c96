"""Model families: one thin file each, over the shared blocks of `lmtool.nn`. Sizes are YAML, never code."""
