"""Parse, call, render. No mathematics."""
