"""One command many times: the jobs of a sweep, and the table that ends it."""
