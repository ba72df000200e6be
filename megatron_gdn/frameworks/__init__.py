"""Adapters of other frameworks, whose launches then build this package's layers."""
