"""Parts that all families share: costs, spans of media, options and encoder."""
