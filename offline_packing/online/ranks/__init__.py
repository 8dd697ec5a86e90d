"""Schedules that give every rank equal work, however the data were packed."""
