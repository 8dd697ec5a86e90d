"""One module per input format; the classes are listed in `offline_packing.sources.SOURCES`."""
