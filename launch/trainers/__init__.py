"""Integrations with other training frameworks: one file each, imported only where that is."""
