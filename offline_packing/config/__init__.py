"""The configuration: frozen, validated models, read from YAML with dotted overrides.

Takes a file and overrides, gives a `PackingConfig` or an error of one line.
"""
