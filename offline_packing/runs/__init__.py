"""One run over one output: where its artifacts are, what they were made from, who works on it.

Takes a configuration, gives a run and the artifacts that are complete. May import the folders
before it: storage, engines, sources, planner, index, layouts and config.
"""
