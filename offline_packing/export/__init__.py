"""Export: finished packs in the forms of other tools."""
