"""A pack on disk: WebDataset entries, and references to media elsewhere."""
