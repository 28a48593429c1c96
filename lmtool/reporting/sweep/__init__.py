"""The summary of a sweep, made from the files of its folder alone: groups over seeds, differences, a page, a table."""
