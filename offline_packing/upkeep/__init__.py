"""Operations on an existing output: status and repair."""
