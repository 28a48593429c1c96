"""Task kinds, one file each: from the columns of a table to scores."""
