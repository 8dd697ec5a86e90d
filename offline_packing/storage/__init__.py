"""Files and bytes, without a notion of samples: atomic writes, hashes, tar, YAML, streams.

Takes paths and bytes, gives bytes that are complete or absent. Imports nothing above it but errors.
"""
