"""A report -> one line a finding, and the exit code."""
