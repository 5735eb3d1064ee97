"""The draft checkpoint: its config and what it declares."""
