"""Which rows stand for the same token, and what the ranks hold together."""
