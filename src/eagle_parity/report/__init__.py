"""A report -> table, JSON."""
