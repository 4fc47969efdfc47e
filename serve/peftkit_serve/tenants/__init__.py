"""Tenants: keys, limits, fair shares, and the adapters that each may name."""
