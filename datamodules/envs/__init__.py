"""Environments: construction, wrappers, seeding."""
