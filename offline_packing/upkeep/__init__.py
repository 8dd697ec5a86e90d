"""Operations on an existing output."""
