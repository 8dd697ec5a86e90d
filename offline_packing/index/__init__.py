"""The index: one row per sample, in Parquet parts, and the table of samples set aside.

Takes measured samples, gives tables and columns of them. May import storage, sources and planner.
"""
