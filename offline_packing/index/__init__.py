"""The index: one row per sample, in Parquet parts, and the table of what was set aside.

Takes measured samples, gives tables and columns of them. May import storage, sources and planner.
"""
