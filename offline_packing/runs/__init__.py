"""One run over one output: the places of its artifacts, their fingerprints, and its lock.

Takes a configuration, gives a run and the artifacts that are complete. May import the folders
before it: storage, engines, sources, planner, index, layouts and config.
"""
