"""The configuration: frozen, validated models, read from YAML with dotted overrides.

Takes a file and overrides, gives a `PackingConfig` or one line that says what is wrong with it.
"""
