"""Rank groups: how an API process owns the processes that hold the weights."""
