"""Adapters: each translates the hooks of one framework into the public names."""
