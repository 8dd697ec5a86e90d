"""Errors that end a stage. Their text is one line: the thing, its value, the limit, the remedy."""


class StageError(RuntimeError):
    """A stage cannot go on."""


class ConfigError(StageError):
    """The configuration, or the command line, cannot be used."""
