"""The stage `plan`: index to plan, and a summary to share."""
