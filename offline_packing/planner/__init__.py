"""Lengths to packs: `plan_packs` and its parts. Arrays in, arrays out.

Takes token counts and budgets, gives a `PackPlan`. May import storage; knows no source, no file of
an output and no configuration.
"""
