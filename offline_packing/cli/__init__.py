"""The command line: `offline-packing VERB CONFIG.yaml [key.sub=value ...]`."""
