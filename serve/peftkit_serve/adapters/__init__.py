"""Adapters in an engine: names and loading, residency, and the memory that holds adapters' weights."""
