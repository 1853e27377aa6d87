"""Tests that stop, kill and freeze the processes of a live pair."""
