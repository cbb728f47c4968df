"""Functions on files."""
