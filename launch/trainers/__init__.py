"""Integrations with other training frameworks: one file each, imported only with its framework."""
