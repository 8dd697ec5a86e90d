"""The stage `plan`: index to plan."""
