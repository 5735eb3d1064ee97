"""Training files as they lie on disk -> capture. One file a format."""
