"""Rows and facts -> findings. One rule a fault."""
