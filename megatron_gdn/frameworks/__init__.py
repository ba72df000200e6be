"""Adapters that let launches of other frameworks build the layers of this package."""
