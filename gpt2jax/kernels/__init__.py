"""The same operation on another schedule."""
