"""A pack on disk: WebDataset entries, token ids, references to media elsewhere."""
