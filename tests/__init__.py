"""Tests mirror the packages; `end_to_end` and `faults` drive two live services."""
